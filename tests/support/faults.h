/*  faults.h - shared by fault tests: a page in which ranks store their results, and checks for leftovers.

    Include after ranks.h. */
#ifndef DDP_TEST_FAULTS_H
#define DDP_TEST_FAULTS_H

#include <ctype.h>
#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>

#define RANKS_MAX 64
/* The promise is 100 ms, but a loaded machine can schedule no rank for seconds. It is still far below every
   timeout, 20 s. */
#define PROMPT_SECONDS \
    (15.0 * DDP_TEST_SLOWDOWN) /* less than a timeout; a busy machine needs seconds to reap a process */
/* A timeout that ranks are meant to reach, before sanitizers stretch it. A machine, or one process on it, can
   stand still for seconds: a slow rank must not be mistaken for the missing one. */
#define RUN_INTO_MS (8000 / DDP_TEST_SLOWDOWN)

/* Results of a rank, in memory that outlives it. */
typedef struct seen {
    int done;
    pid_t pid;
    ddp_result first, second;  /* of the call that met the fault, and of the next */
    double start_at, first_at; /* start of that call, if a test records it, and its end */
    char text[512], text2[512];
} seen;

typedef struct stage {
    double event_at; /* when the fault happened */
    int counter, finished;
    int numbers[RANKS_MAX];
    seen rank[RANKS_MAX];
} stage;

static stage *stage_shared; /* made by faults_start */
static int faults_failures;
static const char *faults_scenario = "";

static void faults_start(int seconds) {
    struct rlimit no_core;
    memset(&no_core, 0, sizeof no_core);
    setrlimit(RLIMIT_CORE, &no_core);
    setvbuf(stdout, NULL, _IOLBF, 0);
    watchdog_start(seconds);
    stage_shared = (stage *)ranks_shared(sizeof *stage_shared);
}

static void faults_begin(const char *scenario) {
    faults_scenario = scenario;
    memset(stage_shared, 0, sizeof *stage_shared);
}

#define EXPECT(condition, ...)                                                                        \
    do {                                                                                              \
        if (!(condition)) {                                                                           \
            faults_failures++;                                                                        \
            fprintf(stderr, "FAIL %s:%d [%s] %s: ", __FILE__, __LINE__, faults_scenario, #condition); \
            fprintf(stderr, __VA_ARGS__);                                                             \
            fputc('\n', stderr);                                                                      \
        }                                                                                             \
    } while (0)

/* Is the word in the text, upper or lower case? */
static RANKS_UNUSED int says(const char *text, const char *word) {
    size_t n = strlen(word);
    for (; *text; text++) {
        size_t i = 0;
        while (i < n && tolower((unsigned char)text[i]) == tolower((unsigned char)word[i])) i++;
        if (i == n) return 1;
    }
    return n == 0;
}

/* "rank 2" in the text, except as the start of "rank 21", or as the rank's own "rank 2/4". */
static RANKS_UNUSED int names_rank(const char *text, int rank) {
    char word[32];
    size_t n = (size_t)snprintf(word, sizeof word, "rank %d", rank);
    for (const char *at = strstr(text, word); at; at = strstr(at + 1, word))
        if (!isdigit((unsigned char)at[n]) && at[n] != '/') return 1;
    return 0;
}

/* This rank's place on the page. */
static RANKS_UNUSED seen *seen_by(ddp_group *world) {
    return &stage_shared->rank[(unsigned)ddp_rank(world) % RANKS_MAX];
}

/* On a rank: stores the result of the call that met the fault, and that of the next call. */
static RANKS_UNUSED ddp_result note(ddp_group *world, ddp_group *group, ddp_result result) {
    seen *s = seen_by(world);
    s->first_at = ranks_now();
    s->pid = getpid();
    s->first = result;
    snprintf(s->text, sizeof s->text, "%s", result == DDP_OK ? "" : ddp_last_error());
    s->second = ddp_barrier(group);
    snprintf(s->text2, sizeof s->text2, "%s", s->second == DDP_OK ? "" : ddp_last_error());
    s->done = 1;
    return ddp_fail(result, "%s", s->text);
}

/* Marks the time of the fault. Several ranks can call it. */
static RANKS_UNUSED void event_now(void) {
    double now = ranks_now();
    __atomic_store(&stage_shared->event_at, &now, __ATOMIC_RELAXED);
}

/* Order between ranks without the library: one rank signals its arrival, others wait for it. The wait is
   limited; an error then shows in the results of the ranks. */
static RANKS_UNUSED void say(int *number) { __atomic_add_fetch(number, 1, __ATOMIC_SEQ_CST); }
static RANKS_UNUSED int heard(int *number, int count) {
    double until = ranks_now() + 20 * DDP_TEST_SLOWDOWN;
    while (__atomic_load_n(number, __ATOMIC_SEQ_CST) < count) {
        if (ranks_now() > until) return 0;
        ranks_sleep_us(500);
    }
    return 1;
}

/* Waits until count ranks have called this, so that no rank leaves while others still check. */
static RANKS_UNUSED void meet_outside(int count) {
    say(&stage_shared->finished);
    heard(&stage_shared->finished, count);
}

//== leftovers =============================================================================

static int faults_count_files(const char *directory, const char *word) {
    DIR *dir = opendir(directory);
    struct dirent *entry;
    int count = 0;
    if (!dir) return 0;
    while ((entry = readdir(dir)) != NULL) count += entry->d_name[0] != '.' && says(entry->d_name, word);
    closedir(dir);
    return count;
}

typedef struct leftovers {
    int files, shm;
} leftovers;

static RANKS_UNUSED leftovers leftovers_now(void) {
    leftovers l;
    l.files = faults_count_files("/proc/self/fd", "");
    l.shm = faults_count_files("/dev/shm", "ddp");
    return l;
}

/* Checks that no child, zombie, descriptor or file is left. */
static RANKS_UNUSED void expect_nothing_left(leftovers before) {
    leftovers now = leftovers_now();
    int status;
    pid_t child = waitpid(-1, &status, WNOHANG);
    double until = ranks_now() + PROMPT_SECONDS;
    /* another test can have one there for a moment */
    while (now.shm > before.shm && ranks_now() < until) {
        ranks_sleep_us(2000);
        now = leftovers_now();
    }
    EXPECT(child == -1 && errno == ECHILD, "child %d is left, as a %s", (int)child,
           child > 0 ? "zombie" : "running process");
    EXPECT(now.files == before.files, "%d open files became %d", before.files, now.files);
    EXPECT(now.shm <= before.shm, "%d files in /dev/shm became %d", before.shm, now.shm);
}

/* Waits until no process with this number is left (or only a zombie of another parent). Returns 0 if it takes
   too long. */
static RANKS_UNUSED int gone(pid_t pid) {
    double until = ranks_now() + 2 * PROMPT_SECONDS;
    while (ranks_now() < until) {
        char path[64], line[256], *state = NULL;
        FILE *file;
        snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
        file = fopen(path, "r");
        if (!file) return 1;
        if (fgets(line, sizeof line, file)) state = strrchr(line, ')');
        fclose(file);
        if (!state || state[2] == 'Z' || state[2] == 'X') return 1;
        ranks_sleep_us(2000);
    }
    return 0;
}

/* ddp_launch with the parameters that fault tests vary; measures its duration. */
static double launch_seconds;
static RANKS_UNUSED ddp_result launch(ranks_mode mode, int world_size, int timeout_ms, ddp_rank_fn fn,
                                      void *user) {
    leftovers before = leftovers_now();
    double start = ranks_now();
    ddp_result result = ranks_run(mode, world_size, timeout_ms * DDP_TEST_SLOWDOWN, fn, user);
    launch_seconds = ranks_now() - start;
    expect_nothing_left(before);
    return result;
}

static int faults_end(void) {
    printf(faults_failures ? "%d failures\n" : "ok\n", faults_failures);
    return faults_failures != 0;
}

#endif /* DDP_TEST_FAULTS_H */

/*  test_mpi_netns.c - mpirun over two machines (network namespaces) with a cable between them, which is cut
    during training.

    test_mpi_netns                   starts mpirun on machine 0
    test_mpi_netns rank FILE         started by mpirun: a rank, which stores its results in FILE
    test_mpi_netns agent PID ...     started by mpirun instead of ssh: runs the rest on the machine of process
    PID.
                                     Skipped without root or iproute2. */
#include <sys/mman.h>
#include <sys/stat.h>
#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"
#include "../support/network.h"

enum { W = 4, TIMEOUT_MS = RUN_INTO_MS, BIG = 1 << 18 };

static int agent(int argc, char **argv) { /* agent PID HOST COMMAND ... */
    static char command[16384];
    for (int i = 4; i < argc; i++)
        snprintf(command + strlen(command), sizeof command - strlen(command), "%s ", argv[i]);
    if (enter_machine_of((pid_t)atoi(argv[2])) != 0) return 99;
    execl("/bin/sh", "sh", "-c", command, (char *)NULL);
    return 98;
}

static int map_stage(const char *file) {
    int fd = open(file, O_RDWR | O_CLOEXEC);
    stage_shared = fd < 0
                       ? NULL
                       : (stage *)mmap(NULL, sizeof *stage_shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    return fd >= 0 && (void *)stage_shared != MAP_FAILED;
}

static ddp_result train(ddp_group *world) {
    static float data[BIG];
    RANKS_CHECK(world,
                ddp_world_size(world) == W && ddp_local_world_size(world) == 2
                    && ddp_local_rank(world) == ddp_rank(world) % 2,
                "local rank %d of %d", ddp_local_rank(world), ddp_local_world_size(world));
    for (int step = 0;; step++) {
        for (int i = 0; i < BIG; i++) data[i] = (float)(ddp_rank(world) + step);
        ddp_result result = ddp_all_reduce(world, data, data, BIG, DDP_F32, DDP_OP_AVG, NULL);
        if (result != DDP_OK) return result;
        for (int i = 0; i < BIG; i++)
            RANKS_CHECK(world, data[i] == 1.5f + (float)step, "step %d element %d is %g", step, i,
                        (double)data[i]);
        if (step == 5) say(&stage_shared->counter);
    }
}

static int rank_main(const char *file) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *world = NULL;
    ddp_result result;
    seen *s;
    watchdog_start(100);
    if (!map_stage(file)) return 1;
    desc.init_method = "mpi://";
    desc.timeout_ms = TIMEOUT_MS;
    result = ddp_group_create(&world, &desc);
    s = &stage_shared->rank[result == DDP_OK ? ddp_rank(world) : atoi(getenv("OMPI_COMM_WORLD_RANK"))];
    s->first = result == DDP_OK ? train(world) : result;
    s->first_at = ranks_now();
    snprintf(s->text, sizeof s->text, "%s", ddp_last_error());
    s->second = ddp_barrier(world);
    s->done = 1;
    ddp_group_destroy(world);
    say(&stage_shared->finished);
    _exit(0); /* MPI cannot be finalised over a cut cable */
}

/* Kills all processes on the two machines, except those that keep the namespaces alive. */
static void stop_machines(void) {
    DIR *folder = opendir("/proc");
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        struct stat theirs, held;
        char name[300];
        pid_t pid = (pid_t)atoi(entry->d_name);
        snprintf(name, sizeof name, "/proc/%d/ns/net", (int)pid);
        for (int i = 0; pid > 0 && i < 2; i++) {
            char place[64];
            snprintf(place, sizeof place, "/proc/%d/ns/net", (int)machine[i]);
            if (pid != machine[i] && stat(name, &theirs) == 0 && stat(place, &held) == 0
                && theirs.st_ino == held.st_ino)
                kill(pid, SIGKILL);
        }
    }
    if (folder) closedir(folder);
}

/* Waits until all ranks have signalled; 0 if mpirun ended before. Their start can take long. */
static int all_say(const int *number, pid_t mpirun) {
    siginfo_t ended;
    memset(&ended, 0, sizeof ended);
    while (__atomic_load_n(number, __ATOMIC_SEQ_CST) < W) {
        if (ended.si_pid) return 0;
        waitid(P_PID, (id_t)mpirun, &ended, WEXITED | WNOHANG | WNOWAIT);
        ranks_sleep_us(2000);
    }
    return 1;
}

static pid_t start_mpirun(const char *self, const char *file) {
    pid_t pid;
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        char command[1400];
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        if (enter(0) != 0) _exit(1);
        snprintf(command, sizeof command,
                 "exec mpirun --allow-run-as-root -n %d --host 10.77.0.1:2,10.77.0.2:2 --map-by slot "
                 "--bind-to none "
                 "--mca plm_rsh_agent '%s agent %d' --mca oob_tcp_if_include cable --mca btl_tcp_if_include "
                 "cable --mca btl self,vader,tcp --mca pml ob1 "
                 "'%s' rank '%s'",
                 W, self, (int)machine[1], self, file);
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(98);
    }
    return pid;
}

int main(int argc, char **argv) {
    char file[] = "/tmp/ddp_test_mpi_netns_XXXXXX", self[512] = "";
    int fd, status;
    pid_t mpirun;
    if (argc > 4 && strcmp(argv[1], "agent") == 0) return agent(argc, argv);
    if (argc > 2 && strcmp(argv[1], "rank") == 0) return rank_main(argv[2]);
    faults_start(100);
    if (geteuid() != 0 || readlink("/proc/self/exe", self, sizeof self - 1) <= 0 || !make_network()) {
        fprintf(stderr, "no root, network namespaces or iproute2 here: skipped\n");
        return 77;
    }
    fd = mkstemp(file);
    if (fd < 0 || ftruncate(fd, sizeof *stage_shared) != 0 || !map_stage(file)) return 1;
    close(fd);
    faults_begin("the cable is cut in the middle of training over mpirun");
    mpirun = start_mpirun(self, file);
    EXPECT(all_say(&stage_shared->counter, mpirun), "only %d of %d ranks trained", stage_shared->counter, W);
    event_now();
    EXPECT(on(1, "ip link set cable down") == 0, "the cable cannot be cut");
    EXPECT(all_say(&stage_shared->finished, mpirun), "only %d of %d ranks came back", stage_shared->finished,
           W);
    stop_machines();
    waitpid(mpirun, &status, 0);
    unlink(file);
    for (int r = 0; r < W; r++) {
        const seen *s = &stage_shared->rank[r];
        double took = s->first_at - stage_shared->event_at;
        EXPECT(s->done && (s->first == DDP_ERR_TIMEOUT || s->first == DDP_ERR_PEER_LOST), "rank %d: %s '%s'",
               r, ddp_result_name(s->first), s->text);
        /* And ranks that stand still at this moment. */
        const char *missing = strstr(s->text, "missing: rank ");
        int named = missing && strpbrk(missing, r < 2 ? "23" : "01");
        EXPECT(named || names_rank(s->text, r < 2 ? 2 : 0) || names_rank(s->text, r < 2 ? 3 : 1),
               "rank %d: '%s' does not name a rank of the other machine", r, s->text);
        EXPECT(s->second == DDP_ERR_POISONED, "rank %d: then %s", r, ddp_result_name(s->second));
        printf("rank %d after %.2f s: %s\n", r, took, s->text);
    }
    return faults_end();
}

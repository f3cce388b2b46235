/*  network.h - two machines emulated by network namespaces, with separate host names and a cable between
    them. Needs root and iproute2.

    A namespace lives as long as the processes in it, so nothing has to be removed. Include after faults.h. */
#ifndef DDP_TEST_NETWORK_H
#define DDP_TEST_NETWORK_H

#include <fcntl.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static pid_t machine[2]; /* processes that keep a namespace alive */

/* Moves this process onto the machine (namespaces) of another process. */
static int enter_machine_of(pid_t pid) {
    static const struct {
        const char *name;
        int flag;
    } spaces[] = {{"net", 0x40000000 /* CLONE_NEWNET */}, {"uts", 0x04000000 /* CLONE_NEWUTS */}};
    int result = 0;
    for (int i = 0; i < 2; i++) {
        char name[64];
        int fd;
        snprintf(name, sizeof name, "/proc/%d/ns/%s", (int)pid, spaces[i].name);
        fd = open(name, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || syscall(SYS_setns, fd, spaces[i].flag) != 0) result = -1;
        if (fd >= 0) close(fd);
    }
    return result;
}

static int enter(int which) { return enter_machine_of(machine[which]); }

/* Runs a command on a machine; returns its exit status. */
static int on(int which, const char *format, ...) {
    char command[256];
    va_list args;
    int status;
    pid_t pid;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    pid = fork();
    if (pid == 0) {
        if (enter(which) != 0) _exit(99);
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(98);
    }
    return waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static pid_t make_machine(const char *host) {
    int ready[2];
    char byte = 0;
    pid_t pid;
    if (pipe(ready) != 0) return -1;
    pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        byte = syscall(SYS_unshare, 0x44000000 /* CLONE_NEWNET | CLONE_NEWUTS */) == 0
               && syscall(SYS_sethostname, host, strlen(host)) == 0;
        (void)!write(ready[1], &byte, 1);
        for (;;) pause();
    }
    if (read(ready[0], &byte, 1) != 1) byte = 0;
    close(ready[0]);
    close(ready[1]);
    return byte ? pid : -1;
}

/* Two machines and a cable: 10.77.0.1 and 10.77.0.2, fd77::1 and fd77::2. */
static int make_network(void) {
    for (int i = 0; i < 2; i++)
        if ((machine[i] = make_machine(i ? "machine1" : "machine0")) < 0) return 0;
    if (on(0, "ip link add cable type veth peer name cable netns %d 2>/dev/null", (int)machine[1]) != 0)
        return 0;
    for (int i = 0; i < 2; i++)
        if (on(i, "ip link set lo up && ip addr add 10.77.0.%d/24 dev cable && ip link set cable up", i + 1)
            != 0)
            return 0;
    /* the kernel can lack IPv6 */
    for (int i = 0; i < 2; i++) on(i, "ip -6 addr add fd77::%d/64 dev cable nodad 2>/dev/null", i + 1);
    return 1;
}

#endif

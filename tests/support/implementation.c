/*  implementation.c - the bodies of ddp.h and ddp_fsdp.h, compiled once per flavour, for all tests that need
    no other private names than those of inner.h. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "../../ddp.h"
#include "inner.h"
#include "machines.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static int refused(long number, ...) {
    if (number == SYS_futex) {
        va_list list;
        va_start(list, number);
        va_arg(list, uint32_t *);
        if (va_arg(list, int) == 1 /* FUTEX_WAKE */) __atomic_add_fetch(&inner.wakes, 1, __ATOMIC_SEQ_CST);
        va_end(list);
    }
#if defined(SYS_memfd_create) && defined(SYS_process_vm_readv)
    if (inner.refuses && (number == SYS_memfd_create || number == SYS_process_vm_readv)) {
        errno = ENOSYS;
        return 1;
    }
#endif
    return 0;
}

/* Linux before 5.14 answers EINVAL. */
static int old_madvise(void *address, size_t size, int advice) {
    if (!inner.refuses || advice != 23 /* MADV_POPULATE_WRITE */) return madvise(address, size, advice);
    errno = EINVAL;
    return -1;
}
#define madvise(address, size, advice) old_madvise(address, size, advice)
#define syscall(...) (refused(__VA_ARGS__) ? -1L : syscall(__VA_ARGS__))

/* Of a rank's hello: a frame of that kind, with its text in the same piece. */
static ssize_t hello_send(int fd, const struct msghdr *message, int flags) {
    ssize_t sent;
    int unread = 1;
    uint32_t kind = 0;
    if (message->msg_iov->iov_len > INNER_TEXT)
        memcpy(&kind, (const char *)message->msg_iov->iov_base + sizeof(uint64_t), sizeof kind);
    if (kind != INNER_HELLO) return sendmsg(fd, message, flags);
    if (inner.before_hello) inner.before_hello();
    sent = sendmsg(fd, message, flags);
    if (!inner.hello_is_read) return sent;
    while (ioctl(fd, SIOCOUTQ, &unread) == 0 && unread > 0) usleep(500);
    inner.hello_is_read();
    return sent;
}
#define sendmsg(fd, message, flags) hello_send(fd, message, flags)

static int limited_fallocate(int fd, off_t offset, off_t size) {
    return inner.no_room ? ENOSPC : posix_fallocate(fd, offset, size);
}
#define posix_fallocate(fd, offset, size) limited_fallocate(fd, offset, size)

static int watched_listen(int fd, int backlog) {
    if (inner.before_listen) inner.before_listen();
    return listen(fd, backlog);
}
#define listen(fd, backlog) watched_listen(fd, backlog)

#define __builtin_cpu_is(name) (inner.is_amd ? inner.is_amd() : __builtin_cpu_is(name))
#define __builtin_cpu_supports(name) (!inner.narrow && __builtin_cpu_supports(name))
#define DDP__LARGE_BYTES (inner.large_bytes)
#define DDP__MIN_RUN_BYTES (inner.runs_bytes)
#define DDP__P2P_SLICE_MS (inner.p2p_slice_ms)
#define DDP__RANDPERM_INSIDE_OUT_FROM (inner.inside_out_from)
#undef DDP__MACHINE_SALT
#define DDP__MACHINE_SALT (machine_salt + pretended_machine())
#define DDP__MPI_CHUNK_BYTES (inner.mpi_chunk_bytes)
#define DDP__MPI_PIECE_BYTES (inner.mpi_piece_bytes)
#define DDP__HOST_PIECE ((size_t)64) /* many pieces with little data */
#define DDP_IMPLEMENTATION
#include "../../ddp_fsdp.h"
#undef sendmsg
#undef listen
#undef madvise
#undef syscall
#undef posix_fallocate

static size_t hello(void *out, const char *token, int rank, int world_size, uint32_t version) {
    ddp__text_frame message = {{DDP__FRAME_MAGIC, DDP__FRAME_HELLO, 0, sizeof message.text, {0, 0}}, ""};
    ddp__rendezvous rv = DDP_ZERO;
    ddp_group group = DDP_ZERO;
    snprintf(rv.token, sizeof rv.token, "%s", token);
    rv.group = &group;
    rv.deadline = ddp_now() + 20.0;
    group.rank = rank;
    group.world_size = world_size;
    group.desc.order = DDP_ORDER_TREE;
    ddp__hello_write(message.text, &rv, version);
    memcpy(out, &message, sizeof message);
    return sizeof message;
}

static size_t frame(void *out, uint32_t kind, int32_t result, uint64_t size, const ddp_call *call) {
    ddp__frame head = {DDP__FRAME_MAGIC, kind, result, size, {0, 0}};
    if (call) {
        head.words[0] = ddp__signature(call);
        head.words[1] = call->count;
    }
    memcpy(out, &head, sizeof head);
    return sizeof head;
}

static ddp_result job_socket(char *name, size_t size) {
    ddp__identity id;
    struct sockaddr_un address;
    ddp_result result = ddp__identity_from_env(&id);
    if (result != DDP_OK || !id.size_variable) return DDP_ERR_INVALID;
    ddp__job_socket_address(&address, id.token);
    snprintf(name, size, "%s", address.sun_path + 1);
    return DDP_OK;
}

static int tcp_listen(const char *host, int port) {
    int fd = ddp__tcp_listen(host, port, 1);
    errno = fd < 0 ? -fd : 0;
    return fd;
}

static const char *backend_name(const ddp_group *group) { return group->backend->name; }

static void forget_cause(ddp_group *group) { group->cause_seen = group->cause_delivered = 0; }

static int handles_in_use(ddp_group *group) {
    int count = 0;
    pthread_mutex_lock(&group->lock);
    for (const ddp__op *op = group->all_ops; op; op = op->next_allocated) count++;
    for (const ddp__op *op = group->free_ops; op; op = op->next) count--;
    pthread_mutex_unlock(&group->lock);
    return count;
}

static void exhaust(ddp_group *group) {
    ddp__job *job = ((ddp__local *)group->state)->heap->job;
    job->limit = job->next_offset;
}

/* The same as ddp__local_poison, one part at a time. */
static void write_cause(ddp_group *group, ddp_result code, const char *text) {
    ddp__control *control = ((ddp__local *)group->state)->control;
    control->poison_code = (int32_t)code;
    snprintf(control->poison_text, sizeof control->poison_text, "%s", text);
    ddp__store(&control->poison, code == DDP_OK ? 1u : 2u);
}

static void force_way(ddp_group *group, int way) {
    for (int kind = 0; kind < DDP__TUNER_KINDS; kind++)
        for (int size = 0; size < 16; size++) {
            ddp_tuner *tuner = &((ddp__local *)group->state)->tuner[kind][size];
            tuner->calls = 4; /* the next call does not try another method */
            for (int i = 0; i < DDP__TUNED_METHODS; i++) tuner->seconds[i] = i == way ? 0.5 : 1;
        }
}

static uint64_t round_of(const ddp_group *group) { return ((const ddp__local *)group->state)->round; }

static int can_read_peers(ddp_group *group) { return ddp__can_read_peers((ddp__local *)group->state); }

static int *can_read(ddp_group *group, int peer) { return &((ddp__local *)group->state)->can_read[peer]; }

static int32_t *pid_of(ddp_group *group, int rank) {
    return &((ddp__local *)group->state)->heap->job->rank[rank].pid;
}

__thread int machine_salt;
test_inner inner = {(size_t)4 << 20,
                    (size_t)64 << 10,
                    65536,
                    300000,
                    INT64_C(214748364),
                    0,
                    NULL,
                    0,
                    0,
                    0,
                    NULL,
                    NULL,
                    NULL,
                    5,
                    DDP__TUNED_METHODS,
                    DDP__METHOD_READ,
                    ddp__reduce_tree,
                    ddp__cast,
                    ddp__divide,
                    ddp__update_f32,
                    ddp__update_f64,
                    ddp__copy_across,
                    ddp__copy_stream,
                    ddp__stream_end,
                    ddp__exact_add_squares,
                    tcp_listen,
                    ddp__slurm_first_host,
                    DDP__HELLO_VERSION,
                    hello,
                    frame,
                    job_socket,
                    backend_name,
                    forget_cause,
                    handles_in_use,
                    exhaust,
                    write_cause,
                    force_way,
                    round_of,
                    can_read_peers,
                    can_read,
                    pid_of};

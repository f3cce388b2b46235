/*  fuzz_tcp.c - frames of any content in the TCP rendezvous and the tcp backend: a libFuzzer harness.

    The input is a script. Its first byte chooses the real side: rank 0 against two played ranks, or a rank
    against a played rank 0, each with or without a secret. Played peers are honest: they join, prove the
    secret and make the same calls. For each frame that they send, the script chooses a change, see
    send_frame. At the end of the script they stay honest.

    A played peer runs inside poll, so one thread does everything. Time is a counter that moves when neither
    side has anything to do: a wait that would hang reaches its timeout at once, and a wait without a timeout
    ends the harness.

    Checked besides memory: honest peers always succeed; a call delivers only bytes that some rank has sent;
    log and error lines have printable characters only; a peer with a wrong proof is never admitted.

    clang -fsanitize=fuzzer,address,undefined fuzz_tcp.c; corpus_tcp/ is where it starts from;
    -max_total_time=600 -timeout=60 for a long run. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* The system as seen by ddp.h. */
static double fuzz_now;
static int fuzz_poll(struct pollfd *fds, nfds_t count, int timeout_ms);
static int fuzz_connect(int fd, const struct sockaddr *to, socklen_t length);
static int fuzz_accept(int fd, struct sockaddr *from, socklen_t *length);

static int fuzz_clock_gettime(clockid_t clock, struct timespec *t) {
    (void)clock;
    t->tv_sec = (time_t)fuzz_now;
    t->tv_nsec = (long)((fuzz_now - (double)t->tv_sec) * 1e9);
    return 0;
}

static int fuzz_usleep(useconds_t us) {
    fuzz_now += us * 1e-6;
    return 0;
}

#define poll fuzz_poll
#define connect fuzz_connect
#define accept fuzz_accept
#define clock_gettime fuzz_clock_gettime
#define usleep fuzz_usleep

#define DDP__MACHINE_SALT fuzz_salt
static int fuzz_salt;
#define DDP_STATIC
#define DDP_IMPLEMENTATION
#pragma GCC diagnostic ignored "-Wunused-function"
#include "../../ddp.h"
#undef poll
#undef connect
#undef accept
#undef clock_gettime
#undef usleep

enum {
    PLAYED = 3,
    CALLS = 10,
    MAX_FRAME = 3 * 65536 + 64,
    CHECKED = 1000 /* bytes, more than any call delivers */
};

//== script =================================================================================

static const uint8_t *script;
static size_t script_left;

static unsigned next_byte(void) {
    if (!script_left) return 0; /* an honest frame */
    script_left--;
    return *script++;
}

static uint64_t next_number(void) {
    static const uint64_t numbers[] = {0,
                                       1,
                                       2,
                                       3,
                                       4,
                                       5,
                                       15,
                                       16,
                                       39,
                                       40,
                                       64,
                                       511,
                                       512,
                                       513,
                                       16383,
                                       16384,
                                       16385,
                                       65535,
                                       65536,
                                       65537,
                                       131072,
                                       196608,
                                       196609,
                                       0x7fffffff,
                                       0x80000000,
                                       0xffffffff,
                                       UINT64_C(1) << 40,
                                       UINT64_MAX >> 1,
                                       UINT64_MAX - 40,
                                       UINT64_MAX,
                                       (uint64_t)-1,
                                       (uint64_t)-3,
                                       (uint64_t)-6,
                                       (uint64_t)-10,
                                       (uint64_t)-11};
    unsigned which = next_byte();
    if (which < sizeof numbers / sizeof *numbers) return numbers[which];
    return next_byte() | (uint64_t)next_byte() << 8;
}

//== the calls that all ranks make ==========================================================

enum { WORLD = 3 };
static unsigned char send_memory[65537], recv_memory[65537];

static ddp_call call_number(int n) {
    static const struct {
        ddp_call_kind kind;
        ddp_dtype dtype;
        size_t count;
        int root;
    } table[CALLS] = {
        {DDP_CALL_ALL_GATHER, DDP_U64, DDP__PROCESS_WORDS, -1} /* of ddp_group_create: process ids */,
        {DDP_CALL_ALL_REDUCE, DDP_U8, 900, -1},
        {DDP_CALL_BROADCAST, DDP_I32, 100, 1},
        {DDP_CALL_BARRIER, DDP_U8, 0, -1},
        {DDP_CALL_REDUCE_SCATTER, DDP_I32, 50, -1},
        {DDP_CALL_ALL_TO_ALL, DDP_U8, 7, -1},
        {DDP_CALL_GATHER, DDP_U8, 300, 0},
        {DDP_CALL_SCATTER, DDP_U8, 9, 2},
        {DDP_CALL_REDUCE, DDP_I64, 3, 1},
        {DDP_CALL_ALL_REDUCE, DDP_U8, 65537, -1},
        /* too large */};
    ddp_call call = ddp__call_of(table[n].kind, NULL, NULL, table[n].count, table[n].dtype);
    call.root = table[n].root;
    if (ddp__has_op(call.kind)) call.op = DDP_OP_MAX;
    return call;
}

//== played peers ===========================================================================

typedef struct played {
    int fd, rank,
        /* -1: no connection. state: number of rendezvous frames that it has sent, then 8 + calls made. */
        state;
    int bad_proof; /* it has sent a wrong proof */
    uint64_t nonce[2];
    char hello[DDP__TEXT_MAX];
    unsigned char in[MAX_FRAME];
    size_t got;
} played;

static played peers[PLAYED];
static int real_rank, secured, peer_count, connections, waiting[8], waiting_count;
static unsigned char secret_key[32];
static ddp_group shape;           /* for the sizes of a played rank's frames */
static int changed, data_changed; /* a frame of this run was changed; so were bytes that a call delivered */

static void peer_close(played *p) {
    if (p->fd >= 0) close(p->fd);
    p->fd = -1;
}

static void put(played *p, const void *bytes, size_t size) {
    for (size_t done = 0; done < size && p->fd >= 0;) {
        ssize_t n = send(p->fd, (const char *)bytes + done, size - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n <= 0) {
            peer_close(p);
            return;
        }
        done += (size_t)n;
    }
}

/* Sends a frame, changed as the script demands. */
static void send_frame(played *p, uint32_t kind, int result, const uint64_t call[2], const void *data,
                       size_t size) {
    static unsigned char bytes[MAX_FRAME + 4096];
    ddp__frame frame = {
        DDP__FRAME_MAGIC, kind, (int32_t)result, size, {call ? call[0] : 0, call ? call[1] : 0}};
    unsigned change = next_byte() % 12;
    size_t total = sizeof frame + size, at;
    if (change) changed = 1;
    if (change == 2 || change == 3 || change == 4 || change == 10) data_changed = 1;
    if (change == 1) {
        unsigned field = next_byte() % 7;
        uint64_t number = next_number();
        if (field == 0) frame.magic ^= number;
        if (field == 1) frame.kind = (uint32_t)number;
        if (field == 2) frame.result = (int32_t)number;
        if (field == 3) frame.size = number;
        if (field == 4) frame.words[0] = number;
        if (field == 5) frame.words[1] = number;
        if (field == 6) frame.magic = __builtin_bswap64(frame.magic);
    }
    memcpy(bytes, &frame, sizeof frame);
    if (size) memcpy(bytes + sizeof frame, data, size);
    if (change == 2 || change == 3) { /* bytes of the data, or of the whole frame */
        size_t from = change == 2 ? sizeof frame : 0;
        for (unsigned n = next_byte() % 16; n && total > from; n--) {
            at = from + (size_t)next_number() % (total - from);
            bytes[at] = (unsigned char)next_byte();
        }
    }
    if (secured && (kind == DDP__FRAME_PROOF || (kind == DDP__FRAME_STATUS && result == DDP__ADMITTED)))
        p->bad_proof = memcmp(bytes + sizeof frame, data, 65) != 0;
    if (change == 4 && total)
        total = (size_t)next_number() % total; /* too short: the following bytes are read as its rest */
    if (change == 5) {                         /* another length, in the head too */
        uint64_t other = next_number() % (65536 * 3);
        if (other > size)
            memset(bytes + sizeof frame + size, size ? bytes[sizeof frame] : 0, (size_t)other - size);
        frame.size = other;
        memcpy(bytes, &frame, sizeof frame);
        total = sizeof frame + (size_t)other;
    }
    if (change == 6) {
        peer_close(p);
        return;
    }
    if (change == 7) return; /* silence */
    if (change == 8) {       /* before it, a frame of another kind */
        ddp__text_frame other = {{DDP__FRAME_MAGIC, next_byte() % 7, 0, sizeof other.text, {0, 0}},
                                 "a text\x1b[2J\n"};
        other.head.result = (int32_t)next_number();
        put(p, &other, sizeof other);
    }
    put(p, bytes, total);
    if (change == 9) put(p, bytes, total); /* twice */
    if (change == 10) {                    /* a text of the script's choice */
        for (at = 0; at < 64; at++) bytes[at] = (unsigned char)next_byte();
        put(p, bytes, 64);
    }
    if (change == 11) peer_close(p);
}

static void peer_hello(played *p) {
    ddp__rendezvous rv = DDP_ZERO;
    shape.rank = p->rank;
    rv.group = &shape;
    rv.deadline = fuzz_now + 3;
    rv.has_secret = secured;
    snprintf(rv.token, sizeof rv.token, "fuzz");
    ddp__hello_write(p->hello, &rv, DDP__HELLO_VERSION);
    p->nonce[0] = 77;
    p->nonce[1] = (uint64_t)p->rank;
    send_frame(p, DDP__FRAME_HELLO, 0, p->nonce, p->hello, sizeof p->hello);
    p->state = 1;
}

static void send_text(played *p, uint32_t kind, int result, const uint64_t nonce[2], const char *text) {
    char all[DDP__TEXT_MAX] = "";
    snprintf(all, sizeof all, "%s", text);
    send_frame(p, kind, result, nonce, all, sizeof all);
}

/* The data of a rank in a call, or rank 0's answer. */
static void send_data(played *p, int number) {
    static unsigned char answer[MAX_FRAME];
    ddp_call call = call_number(number);
    ddp__frame frame = p->rank ? ddp__tcp_request_head(&call, p->rank, WORLD)
                               : ddp__tcp_answer_head(&call, WORLD);
    memset(answer, number, frame.size + sizeof(ddp__process_id[WORLD]));
    if (number == 0 && p->rank) { /* a process id: machine and nonce */
        ddp__process_id id = {1000 + (uint64_t)p->rank, 5, 1, 0};
        memcpy(answer, id, sizeof id);
    }
    if (number == 0 && !p->rank) {
        ddp__process_id ids[WORLD] = {{1000, 5, 1, 0}, {1001, 5, 1, 0}, {1002, 5, 1, 0}};
        memcpy(answer, ids, sizeof ids);
    }
    send_frame(p, DDP__FRAME_DATA, frame.result, frame.words, answer, frame.size);
}

/* A played rank has read a frame. */
static void peer_react(played *p, const ddp__frame *frame, const char *data) {
    char proof[65];
    if (p->rank == 0) {
        if (frame->kind == DDP__FRAME_HELLO && !p->state) {
            memcpy(p->hello, data, sizeof p->hello);
            memcpy(p->nonce, frame->words, sizeof p->nonce);
            p->state = 1;
            if (secured) {
                static const uint64_t nonce[2] = {88, 99};
                send_text(p, DDP__FRAME_CHALLENGE, 0, nonce, "");
            }
        }
        if (p->state == 1 && (!secured || frame->kind == DDP__FRAME_PROOF)) {
            static const uint64_t nonce[2] = {88, 99};
            ddp__proof_write(proof, secret_key, '0', p->nonce, nonce, p->hello);
            send_text(p, DDP__FRAME_STATUS, DDP__ADMITTED, NULL, secured ? proof : "");
            send_text(p, DDP__FRAME_STATUS, 0, NULL, "pid 5 on played");
            p->state = 8;
        } else if (p->state >= 8 && frame->kind == DDP__FRAME_DATA) {
            int number = p->state - 8;
            if (p->bad_proof) abort();
            p->state++;
            if (number < CALLS) send_data(p, number);
        }
        return;
    }
    if (frame->kind == DDP__FRAME_CHALLENGE) {
        ddp__proof_write(proof, secret_key, 'r', p->nonce, frame->words, p->hello);
        send_text(p, DDP__FRAME_PROOF, 0, NULL, proof);
    } else if (frame->kind == DDP__FRAME_STATUS && frame->result == DDP__ADMITTED) {
        if (p->bad_proof) abort();
        p->state = 7;
    } else if (frame->kind == DDP__FRAME_STATUS && frame->result == 0 && p->state == 7) {
        p->state = 8;
        send_data(p, 0);
    } else if (frame->kind == DDP__FRAME_DATA && p->state >= 8) {
        p->state++;
        if (p->state - 8 < CALLS) send_data(p, p->state - 8);
    }
}

/* Reads at most one frame of the received bytes. Returns 1 if anything happened. */
static int peer_step(played *p) {
    ddp__frame frame;
    size_t need = sizeof frame;
    ssize_t n;
    if (p->fd < 0) return 0;
    if (p->rank && p->state == 0) {
        peer_hello(p);
        return 1;
    }
    if (p->got >= sizeof frame) {
        memcpy(&frame, p->in, sizeof frame);
        if (frame.size > sizeof p->in - sizeof frame) abort(); /* the real rank sends only valid frames */
        need += frame.size;
    }
    n = recv(p->fd, p->in + p->got, need - p->got, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        peer_close(p);
        return 1;
    }
    if (n > 0) p->got += (size_t)n;
    if (p->got < sizeof frame) return n > 0;
    memcpy(&frame, p->in, sizeof frame);
    if (frame.magic != DDP__FRAME_MAGIC) abort();
    if (p->got < sizeof frame + frame.size) return n > 0;
    p->got = 0;
    peer_react(p, &frame, (const char *)p->in + sizeof frame);
    return 1;
}

static int fuzz_poll(struct pollfd *fds, nfds_t count, int timeout_ms) {
    int ready, busy = 0;
    for (int i = 0; i < peer_count; i++) busy |= peer_step(&peers[i]);
    ready = poll(fds, count, 0);
    if (ready || busy) return ready;
    if (timeout_ms < 0) abort(); /* a wait without an end */
    fuzz_now += timeout_ms * 1e-3 + 1e-4;
    return 0;
}

/* A pair of sockets: one end takes fd's place, the other one is a played rank 0's. */
static int fuzz_connect(int fd, const struct sockaddr *to, socklen_t length) {
    int pair[2], flags = fcntl(fd, F_GETFL);
    (void)to;
    (void)length;
    if (++connections > 20 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) {
        fuzz_now += 0.5;
        errno = ECONNREFUSED;
        return -1;
    }
    dup2(pair[0], fd);
    close(pair[0]);
    fcntl(fd, F_SETFL, flags);
    peer_close(&peers[0]);
    memset(&peers[0], 0, offsetof(played, in));
    peers[0].got = 0;
    peers[0].fd = pair[1];
    peer_count = 1;
    return 0;
}

/* Played ranks connect once, and again if their first connection ended before the world was complete. */
static int fuzz_accept(int fd, struct sockaddr *from, socklen_t *length) {
    (void)fd;
    (void)from;
    (void)length;
    if (waiting_count) return waiting[--waiting_count];
    errno = EAGAIN;
    return -1;
}

static void play_ranks(void) {
    peer_count = WORLD - 1;
    for (int i = 0; i < peer_count; i++) {
        int pair[2];
        memset(&peers[i], 0, offsetof(played, in));
        peers[i].got = 0;
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) abort();
        peers[i].fd = pair[1];
        peers[i].rank = i + 1;
        waiting[waiting_count++] = pair[0];
    }
}

//== the real rank ==========================================================================

static void expect_printable(const char *text) {
    for (; *text; text++)
        if (*text < ' ' || *text > '~') abort();
}

static void keep_log(const char *text, void *user) {
    (void)user;
    expect_printable(text);
}

/* Makes the calls of the table; the first one was part of joining. */
static void make_calls(ddp_group *group) {
    for (int n = 1; n < CALLS; n++) {
        ddp_call call = call_number(n);
        ddp_result result;
        memset(recv_memory, call.kind == DDP_CALL_BROADCAST && real_rank == 1 ? n : 0xee, CHECKED);
        memset(send_memory, n, CHECKED);
        call.send = send_memory;
        call.recv = recv_memory;
        result = ddp_group_call(group, &call, NULL);
        if (result != DDP_OK) expect_printable(ddp_last_error());
        if (!changed && result != (n == CALLS - 1 ? DDP_ERR_UNSUPPORTED : DDP_OK)) abort();
        for (size_t i = 0; result == DDP_OK && !data_changed && i < CHECKED; i++)
            if (recv_memory[i] != n && recv_memory[i] != 0xee) abort(); /* a value that no rank has sent */
        if (result != DDP_OK && result != DDP_ERR_UNSUPPORTED) break;
    }
    ddp_group_status(group);
    expect_printable(ddp_last_error());
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    ddp_group_desc desc = DDP_ZERO, resolved;
    ddp__rendezvous rv = DDP_ZERO;
    ddp_group *group;
    ddp__tcp *t;
    unsigned mode;
    script = data;
    script_left = size;
    mode = next_byte();
    real_rank = mode & 1;
    secured = mode >> 1 & 1;
    fuzz_now = 1000;
    connections = peer_count = waiting_count = changed = data_changed = 0;
    memset(&shape, 0, sizeof shape);
    shape.world_size = WORLD;
    shape.desc.order = DDP_ORDER_TREE;
    memset(secret_key, 7, sizeof secret_key);
    for (int i = 0; i < PLAYED; i++) peers[i].fd = -1;
    desc.timeout_ms = 3000;
    desc.log_fn = keep_log;
    if (ddp__group_desc_resolve("fuzz", &desc, &resolved) != DDP_OK) abort();
    if (ddp__group_alloc(&group, &resolved, &ddp__backend_tcp, real_rank, WORLD, NULL) != DDP_OK) abort();
    snprintf(rv.token, sizeof rv.token, "fuzz");
    snprintf(rv.hosts, sizeof rv.hosts, "127.0.0.1");
    rv.numeric_hosts = rv.port_count = 1;
    rv.port = 1;
    rv.has_secret = secured;
    memcpy(rv.key, secret_key, sizeof rv.key);
    t = ddp__tcp_alloc(group, &rv, 0);
    if (!t) abort();
    if (real_rank == 0) {
        struct sockaddr name = {AF_UNIX, ""};
        int listener = t->rendezvous.peer[t->rendezvous.peer_count - 1].fd = socket(
            AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (bind(listener, &name, sizeof name.sa_family) != 0 || listen(listener, 1) != 0)
            abort(); /* no connection arrives there */
        play_ranks();
    }
    fuzz_salt = real_rank;
    if (ddp__tcp_open(group, t, &group->state) == DDP_OK) {
        make_calls(group);
        group->backend->close(group, group->state);
    } else {
        if (!changed) abort();
        expect_printable(ddp_last_error());
    }
    ddp__group_delete(group);
    while (waiting_count) close(waiting[--waiting_count]);
    for (int i = 0; i < PLAYED; i++) peer_close(&peers[i]);
    return 0;
}

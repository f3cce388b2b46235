/*  ucx_backend.c - UCX as a backend of ddp.h, through >>spi only: an example of how to add an engine that
    moves bytes.

    A group has a UCX worker with an endpoint to each rank. A collective sends a message to every rank and
    receives one from every rank, possibly empty. A reduction gathers its inputs and reduces them in tree
    order. The tag of a message identifies the sender and the call. The receiver compares tag and size and
    answers; the sender waits for the answer. The control group, which is also split, exchanges addresses and
    failures, and provides group memory. After a failure UCX can still hold buffers that belong to their
    owners again: the worker is then leaked instead of destroyed. */
#include "../../ddp.h"
#include <pthread.h>
#include <string.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#pragma GCC diagnostic ignored \
    "-Wunused-parameter" /* the functions of the table get more arguments than they need */
#define UCX(call)                                                                                           \
    do {                                                                                                    \
        ucs_status_t s = (call);                                                                            \
        if (s != UCS_OK) return failed(e, ddp_fail(DDP_ERR_ENGINE, "%s: %s", #call, ucs_status_string(s))); \
    } while (0)

typedef struct engine {
    ddp_group *control;
    int owns_control, rank, size; /* owns: created by a split */
    ucp_context_h context;
    ucp_worker_h worker;
    pthread_mutex_t mutex; /* protects the worker and the following fields */
    int stopped;           /* by a failure */
    /* left: the request of the message that announces it. */
    struct {
        ucp_ep_h endpoint;
        void *left;
    } peers[];
} engine;

typedef struct message {
    engine *e;
    int peer, sends, refused;
    char *memory;
    size_t bytes;
    ucp_tag_t tag;
    void *requests[2]; /* of the message and, for a send, of the answer */
} message;

/* 16 bits of a tag are the sender, 8 this, 32 the message's own tag, or a collective's op and root, 4 its
   dtype and 4 its kind. */
enum { COLLECTIVE, SINGLE, ANSWER, LEFT };
static const ucp_tag_t all_bits = ~(ucp_tag_t)0, sender_bits = all_bits << 40, which_bits = all_bits << 8;
static ucp_tag_t tag_of(int sender, int is, uint64_t which) {
    return (ucp_tag_t)sender << 48 | (ucp_tag_t)is << 40 | which;
}

/* always return a request */
static const ucp_request_param_t plain = {.op_attr_mask = UCP_OP_ATTR_FLAG_NO_IMM_CMPL};
static ucs_status_t status_of(void *request) {
    return UCS_PTR_IS_PTR(request) ? ucp_request_check_status(request) : UCS_PTR_STATUS(request);
}
static void forget(void *request) {
    if (UCS_PTR_IS_PTR(request)) ucp_request_free(request);
}
static ddp_group *control_of(void *state) { return ((engine *)state)->control; }
static ddp_result status(const ddp_group *group, void *state) { return ddp_group_cause(control_of(state)); }
static void poison(ddp_group *group, void *state, ddp_result cause, const char *text) {
    ddp_group_poison(control_of(state), cause, text);
}
static ddp_result failed(engine *e, ddp_result cause) {
    return poison(NULL, e, cause, ddp_last_error()), cause;
}

//== messages ===============================================================================

/* UCX calls it when a message has arrived. */
static void answer(void *request, ucs_status_t result, const ucp_tag_recv_info_t *info, void *user) {
    message *m = (message *)user;
    ucp_tag_t tag = info->sender_tag;
    m->refused = info->length != m->bytes || tag != m->tag;
    if (result == UCS_OK && !m->refused)
        forget(ucp_tag_send_nbx(m->e->peers[m->peer].endpoint, NULL, 0,
                                tag_of(m->e->rank, ANSWER, tag & ~sender_bits), &plain));
    if (m->refused)
        failed(m->e, ddp_fail(DDP_ERR_MISMATCH,
                              "rank %d sends %zu bytes in %s %s, rank %d expects %zu bytes in %s %s", m->peer,
                              info->length, ddp_call_name((ddp_call_kind)(tag & 15)),
                              ddp_dtype_name((ddp_dtype)(tag >> 4 & 15)), m->e->rank, m->bytes,
                              ddp_call_name((ddp_call_kind)(m->tag & 15)),
                              ddp_dtype_name((ddp_dtype)(m->tag >> 4 & 15))));
}

/* Sends its part of send to the peer, or receives a part of recv from it. The rank's own parts are only
   located. */
static void start(engine *e, const ddp_call *c, message *m, int peer, int sends, char *recv) {
    ddp_call_kind k = c->kind;
    int single = k == DDP_CALL_SEND || k == DDP_CALL_RECV, from = sends ? e->rank : peer;
    ddp_bytes part = sends ? ddp_call_sends(c, e->rank, peer) : ddp_call_receives(c, e->rank, peer);
    uint64_t which = single ? (uint64_t)c->tag : (uint64_t)c->op << 20 | (uint64_t)(c->root + 1);
    ucp_request_param_t to_answer = {plain.op_attr_mask | UCP_OP_ATTR_FIELD_CALLBACK
                                         | UCP_OP_ATTR_FIELD_USER_DATA,
                                     .cb.recv = answer, .user_data = m};
    *m = (message){.e = e, .peer = peer, .sends = sends, .bytes = part.size};
    m->memory = !sends ? recv : k == DDP_CALL_BROADCAST ? (char *)c->recv : (char *)(uintptr_t)c->send;
    m->tag = tag_of(from, single ? SINGLE : COLLECTIVE,
                    which << 8 | (uint64_t)c->dtype << 4 | (single ? DDP_CALL_SEND : k));
    /* Inputs of a reduction are stored one after the other. */
    if (part.size) m->memory += !sends && ddp_call_adds(c) ? (size_t)peer * part.size : part.begin;
    if (peer == e->rank) return;
    pthread_mutex_lock(&e->mutex);
    if (!e->stopped && !sends)
        m->requests[0] = ucp_tag_recv_nbx(e->worker, m->memory, m->bytes, m->tag,
                                          single ? which_bits : sender_bits, &to_answer);
    if (!e->stopped && sends)
        m->requests[0] = ucp_tag_send_nbx(e->peers[peer].endpoint, m->memory, m->bytes, m->tag, &plain);
    if (!e->stopped && sends)
        m->requests[1] = ucp_tag_recv_nbx(e->worker, NULL, 0, tag_of(peer, ANSWER, m->tag & ~sender_bits),
                                          all_bits, &plain);
    pthread_mutex_unlock(&e->mutex);
}

/* Progresses all messages of this rank, since peers can wait for any of them. Stores in done whether m has
   finished. Messages that arrived before a failure was known count. */
static ddp_result poll(message *m, int *done) {
    engine *e = m->e;
    ucs_status_t now = m->requests[0] ? UCS_OK : UCS_INPROGRESS;
    pthread_mutex_lock(&e->mutex);
    ddp_result known = status(NULL, e), result = known;
    while (!e->stopped && ucp_worker_progress(e->worker)) {
    }
    for (int i = 0; i <= m->sends && now == UCS_OK; i++) now = status_of(m->requests[i]);
    *done = now == UCS_OK && !m->refused;
    if (now == UCS_INPROGRESS && status_of(e->peers[m->peer].left) == UCS_OK)
        result = failed(e, ddp_fail(DDP_ERR_PEER_LOST, "rank %d has destroyed this group", m->peer));
    else if (now != UCS_OK && now != UCS_INPROGRESS && !m->refused)
        result = failed(e, ddp_fail(DDP_ERR_PEER_LOST, "rank %d: UCX: %s", m->peer, ucs_status_string(now)));
    e->stopped |= known != DDP_OK || result != DDP_OK;
    for (int i = 0; i <= m->sends && *done; i++) forget(m->requests[i]);
    pthread_mutex_unlock(&e->mutex);
    return *done ? DDP_OK : result;
}

static ddp_result p2p_start(ddp_group *group, void *state, const ddp_call *c, void **request) {
    message *m = (message *)(*request = ddp_host_alloc(group, sizeof *m));
    if (m) start((engine *)state, c, m, c->root, c->kind == DDP_CALL_SEND, (char *)c->recv);
    return m ? DDP_OK : DDP_ERR_NO_MEMORY;
}

static ddp_result p2p_poll(ddp_group *group, void *state, void *request, int *done) {
    ddp_result result = poll((message *)request, done);
    if (*done || result != DDP_OK) ddp_host_free(group, request);
    return result;
}

//== collectives ============================================================================

static ddp_result run(ddp_group *group, void *state, const ddp_call *c) {
    engine *e = (engine *)state;
    int w = e->size, ms = ddp_group_timeout_ms(group), reduces = ddp_call_adds(c);
    double deadline = ddp_now() + ms * 1e-3;
    message *m = (message *)ddp_host_alloc(
        group,
        (size_t)w * (2 * sizeof *m + sizeof(void *) + (reduces ? c->count * ddp_dtype_size(c->dtype) : 0)));
    /* After the buffers to send and receive; then those to reduce. */
    const void **sources = (const void **)(void *)(m + 2 * w);
    ddp_result result = m ? status(group, e) : failed(e, DDP_ERR_NO_MEMORY);
    for (int r = 0; r < w && result == DDP_OK; r++) {
        start(e, c, &m[r], r, 0, reduces ? (char *)(sources + w) : (char *)c->recv);
        start(e, c, &m[w + r], r, 1, NULL);
        sources[r] = m[r].memory;
        if (r == e->rank && m[r].bytes) memmove(m[r].memory, m[w + r].memory, m[r].bytes);
    }
    for (int i = 0, tries = 0, done; i < 2 * w && result == DDP_OK; i += done) {
        done = i % w == e->rank;
        if (!done) result = poll(&m[i], &done);
        if (!done && ddp_now() > deadline)
            failed(e, ddp_fail(DDP_ERR_TIMEOUT, "timed out after %d ms: missing: rank %d", ms, m[i].peer));
        if (!done) tries < 1000 ? tries++, sched_yield() : usleep(50);
    }
    if (result == DDP_OK && reduces && ddp_call_receives(c, e->rank, e->rank).size)
        ddp_reduce_tree(c->recv, sources, w, c->count, c->dtype, c->op, c->divisor);
    ddp_host_free(group, m);
    return result;
}

//== groups and memory ======================================================================

static ddp_result meet(ddp_group *group, ddp_group *control, int owns_control, void **state) {
    ucp_params_t features = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_TAG};
    ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE
                                                | UCP_WORKER_PARAM_FIELD_FLAGS,
                                  .thread_mode = UCS_THREAD_MODE_SERIALIZED,
                                  .flags = UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK};
    ddp_call barrier = {.kind = DDP_CALL_BARRIER, .root = -1};
    size_t w = (size_t)ddp_world_size(control), card = 4096, length,
           bytes = sizeof(engine) + w * (sizeof(ucp_ep_h) + sizeof(void *));
    engine *e = (engine *)(*state = ddp_host_alloc(group, bytes + w * card));
    char *cards = (char *)e + bytes;
    ucp_address_t *address;
    if (!e) return ddp_group_poison(control, DDP_ERR_NO_MEMORY, ddp_last_error()), DDP_ERR_NO_MEMORY;
    *e = (engine){.control = control,
                  .owns_control = owns_control,
                  .rank = ddp_rank(control),
                  .size = (int)w,
                  .mutex = PTHREAD_MUTEX_INITIALIZER};
    UCX(ucp_init(&features, NULL, &e->context));
    UCX(ucp_worker_create(e->context, &params, &e->worker));
    UCX(ucp_worker_get_address(e->worker, &address, &length));
    if (length > card)
        return failed(e, ddp_fail(DDP_ERR_ENGINE, "an address of UCX has %zu bytes, expected are up to %zu",
                                  length, card));
    memcpy(cards + (size_t)e->rank * card, address, length);
    ucp_worker_release_address(e->worker, address);
    if (ddp_all_gather(control, cards + (size_t)e->rank * card, cards, card, DDP_U8, NULL) != DDP_OK)
        return status(group, e);
    for (size_t r = 0; r < w; r++) {
        ucp_ep_params_t to = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
                              .address = (const ucp_address_t *)(const void *)(cards + r * card)};
        UCX(ucp_ep_create(e->worker, &to, &e->peers[r].endpoint));
        e->peers[r].left = ucp_tag_recv_nbx(e->worker, NULL, 0, tag_of((int)r, LEFT, 0), all_bits, &plain);
    }
    return run(group, e, &barrier); /* no rank returns before all are connected */
}

static ddp_result begin(ddp_group *group, void **state) {
    return meet(group, (ddp_group *)ddp_group_backend_user(group), 0, state);
}

static ddp_result split(ddp_group *parent, void *state, ddp_group *child, const int *members,
                        int member_count, void **child_state) {
    ddp_group *control = NULL;
    ddp_result result = ddp_group_split(control_of(state), child ? members[0] : -1,
                                        child ? ddp_rank(child) : 0, &control);
    return result == DDP_OK && child ? meet(child, control, 1, child_state) : result;
}

static void leave(ddp_group *group, void *state) {
    engine *e = (engine *)state;
    int healthy = status(group, e) == DDP_OK;
    for (int r = 0; r < e->size && healthy; r++)
        forget(ucp_tag_send_nbx(e->peers[r].endpoint, NULL, 0, tag_of(e->rank, LEFT, 0), &plain));
    /* includes answers that others wait for */
    void *flush = healthy ? ucp_worker_flush_nbx(e->worker, &plain) : NULL;
    for (double end = ddp_now() + 1; status_of(flush) == UCS_INPROGRESS && ddp_now() < end;)
        ucp_worker_progress(e->worker);
    if (healthy && status_of(flush) != UCS_INPROGRESS) {
        ucp_worker_destroy(e->worker);
        ucp_cleanup(e->context);
    }
    if (e->owns_control) ddp_group_destroy(e->control);
    ddp_host_free(group, e);
}

static ddp_result alloc(ddp_group *group, void *state, size_t size_bytes, void **out) {
    return ddp_group_alloc(control_of(state), size_bytes, out);
}
static ddp_result release(ddp_group *group, void *state, void *memory) {
    return ddp_group_free(control_of(state), memory);
}

static const ddp_backend backend = {
    .name = "ucx",
    .open = begin,
    .run = run,
    .p2p_start = p2p_start,
    .p2p_poll = p2p_poll,
    .split = split,
    .alloc = alloc,
    .free = release,
    .status = status,
    .poison = poison,
    .close = leave,
};
const ddp_backend *ucx_backend(void) { return &backend; }

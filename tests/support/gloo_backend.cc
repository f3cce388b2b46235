/*  gloo_backend.cc - Gloo as a backend of ddp.h, through >>spi alone: what it takes to plug in an engine that moves bytes between ranks.

    Gloo can wait for a buffer but not tell whether it is complete, so what is waited for ends with a mark in memory, which is looked at. A message is a
    note, compared with what the receiver expects, because Gloo ends the program when sizes differ; then the data; then a mark back to the sender.
    A collective is such a message to and from everybody. A reduction gathers what it needs and reduces that in tree order. A failure is an alarm to
    everybody; each rank keeps buffers ready for those. Ranks tell each other their addresses over the control group, or the parent of a split. */
#include "../../ddp.h"

#include <gloo/common/error.h>
#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <map>
#include <set>

#include <signal.h>
#include <unistd.h>

namespace {

using Buffer = std::unique_ptr<gloo::transport::UnboundBuffer>;
using Lock = std::lock_guard<std::recursive_mutex>;
struct Note { uint64_t kind, dtype, op, root, count, divisor, bytes, mark; };
struct Alarm { int cause; char text[400], mark; };
struct Piece { char *memory; size_t bytes; };
struct Message { // first: the note; second: the data; third: the mark back
    int peer;
    bool sends, compared, done;
    Piece piece;
    uint64_t slot;
    Note note, theirs;
    std::vector<char> data;
    char mark;
    Buffer first, second, third;
};
using MessageRef = std::unique_ptr<Message>;
struct Stopped {}; // thrown once the group has failed

enum { NOTE, DATA, TAKEN }; // the lowest bits of a slot; then 29 of the message's number, 31 of its tag
const uint64_t collective_slot = (uint64_t)1 << 62, alarm_slot = (uint64_t)1 << 63;
const size_t cell = gloo::transport::Address::kMaxByteSize;
thread_local int peer; // whom this thread deals with

struct Engine {
    int rank, size, timeout_ms;
    std::shared_ptr<gloo::transport::Device> device;
    std::shared_ptr<gloo::transport::Context> context;
    uint64_t round; // of collectives
    std::set<void *> memory;
    std::recursive_mutex mutex; // of what follows
    Alarm alarm; // the first cause
    std::vector<Alarm> alarms; // of each rank
    std::vector<Buffer> bells; // which they come through; one's own sends
    Buffer mark;
    int marks, rung; // sent so far
    std::list<Message *> receives; // not done yet
    std::map<std::pair<int, int64_t>, uint64_t> numbers; // of messages to a rank (tag) and from it (~tag)
};

Buffer buffer(Engine *e, const void *memory, size_t bytes) { return e->context->createUnboundBuffer(const_cast<void *>(memory), bytes); }

//== failures ===============================================================================

void poison(ddp_group *, void *state, ddp_result cause, const char *text) {
    Engine *e = (Engine *)state;
    Lock lock(e->mutex);
    if (e->alarm.cause != DDP_OK) return;
    snprintf(e->alarm.text, sizeof e->alarm.text, "%s", text);
    e->alarm.cause = (int)cause;
    e->alarm.mark = 1;
    for (int r = 0; r < (int)e->bells.size(); r++)
        try { if (r != e->rank) e->bells[(size_t)e->rank]->send(r, alarm_slot), e->rung++; } catch (const std::exception &) { /* that rank is gone */ }
}

bool seen(const void *mark) { return __atomic_load_n((const char *)mark, __ATOMIC_ACQUIRE) != 0; }

ddp_result status(const ddp_group *, void *state) {
    Engine *e = (Engine *)state;
    Lock lock(e->mutex);
    for (const Alarm &a : e->alarms) if (seen(&a.mark)) poison(NULL, e, (ddp_result)a.cause, a.text);
    return e->alarm.cause == DDP_OK ? DDP_OK : ddp_fail((ddp_result)e->alarm.cause, "%s", e->alarm.text);
}

/* What is thrown inside becomes the cause, unless a rank has told another: those that fail also leave. */
template <class Body> ddp_result guarded(Engine *e, Body body) {
    try { body(); return DDP_OK; }
    catch (const Stopped &) {}
    catch (const gloo::IoException &x) {
        if (status(NULL, e) == DDP_OK) poison(NULL, e, DDP_ERR_PEER_LOST, ("rank " + std::to_string(peer) + ": Gloo: " + x.what()).c_str());
    } catch (const std::exception &x) { poison(NULL, e, DDP_ERR_ENGINE, (std::string("Gloo: ") + x.what()).c_str()); }
    return DDP_ERR_POISONED;
}

//== messages ===============================================================================

MessageRef start(Engine *e, int with, bool sends, Piece piece, const Note &note, uint64_t slot) {
    MessageRef m(new Message{peer = with, sends, false, false, piece, slot, note, {}, std::vector<char>(piece.bytes + 1), 0, {}, {}, {}});
    m->first = buffer(e, sends ? &m->note : &m->theirs, sizeof note);
    m->second = buffer(e, m->data.data(), m->data.size());
    m->third = buffer(e, &m->mark, 1);
    if (!sends) m->first->recv(peer, slot + NOTE);
    if (!sends) return m;
    if (piece.bytes) memcpy(m->data.data(), piece.memory, piece.bytes);
    m->data.back() = 1;
    m->third->recv(peer, slot + TAKEN);
    m->first->send(peer, slot + NOTE);
    m->second->send(peer, slot + DATA);
    return m;
}

/* Whether the mark that comes through this buffer is there. Throws when it will not come any more, if this is what is waited for. */
bool came(Engine *e, const Buffer &through, const void *mark, bool waits) {
    bool here = seen(mark);
    if (!here && !waits) return false;
    if (!here && status(NULL, e) != DDP_OK) throw Stopped();
    if (!here) through->abortWaitRecv(); // so that the wait ends at once, or throws what happened to the connection
    through->waitRecv();
    return here;
}

bool progress(Engine *e, Message *m, bool waits) {
    peer = m->peer;
    if (m->done) return true;
    if (m->sends) return m->done = came(e, m->third, &m->mark, waits);
    if (!m->compared && !came(e, m->first, &m->theirs.mark, waits)) return false;
    if (memcmp(&m->theirs, &m->note, sizeof m->note) != 0) {
        ddp_fail(DDP_ERR_MISMATCH, "rank %d sends %zu bytes in %s %s, rank %d expects %zu bytes in %s %s", peer, (size_t)m->theirs.bytes,
                 ddp_call_name((ddp_call_kind)m->theirs.kind), ddp_dtype_name((ddp_dtype)m->theirs.dtype), e->rank, (size_t)m->note.bytes,
                 ddp_call_name((ddp_call_kind)m->note.kind), ddp_dtype_name((ddp_dtype)m->note.dtype));
        poison(NULL, e, DDP_ERR_MISMATCH, ddp_last_error());
        throw Stopped();
    }
    if (!m->compared) m->second->recv(peer, m->slot + DATA);
    m->compared = true;
    if (!came(e, m->second, &m->data.back(), waits)) return false;
    if (m->piece.bytes) memcpy(m->piece.memory, m->data.data(), m->piece.bytes);
    Lock lock(e->mutex);
    e->mark->send(peer, m->slot + TAKEN);
    e->marks++;
    return m->done = true;
}

ddp_result p2p_start(ddp_group *, void *state, const ddp_call *c, void **request) {
    Engine *e = (Engine *)state;
    bool sends = c->kind == DDP_CALL_SEND;
    Piece piece = {sends ? (char *)(uintptr_t)c->send : (char *)c->recv, c->count * ddp_dtype_size(c->dtype)};
    Note note = {DDP_CALL_SEND, (uint64_t)c->dtype, 0, 0, c->count, 0, piece.bytes, 1};
    return guarded(e, [&] {
        Lock lock(e->mutex);
        uint64_t number = e->numbers[{c->root, sends ? c->tag : ~(int64_t)c->tag}]++;
        Message *m = start(e, c->root, sends, piece, note, (uint64_t)c->tag << 31 | (number & 0x1fffffff) << 2).release();
        if (!sends) e->receives.push_back(m);
        *request = m;
    });
}

/* A peer may be waiting for any of the receives here. */
ddp_result p2p_poll(ddp_group *, void *state, void *request, int *done) {
    Engine *e = (Engine *)state;
    Message *message = (Message *)request;
    Lock lock(e->mutex);
    ddp_result result = guarded(e, [&] {
        e->receives.remove_if([&](Message *m) { return progress(e, m, false); });
        *done = progress(e, message, true);
    });
    if (!*done && result == DDP_OK) return DDP_OK;
    e->receives.remove(message);
    delete message;
    return result;
}

//== collectives ============================================================================

void exchange(Engine *e, const ddp_call *c, uint64_t count, const std::vector<Piece> &give, const std::vector<Piece> &take) {
    double deadline = ddp_now() + e->timeout_ms * 1e-3;
    uint64_t slot = collective_slot | (e->round++ & 0x1fffffff) << 2;
    std::vector<MessageRef> open;
    for (int i = 0; i < 2 * e->size; i++) {
        const Piece &piece = i % 2 ? give[(size_t)i / 2] : take[(size_t)i / 2], &own = give[(size_t)e->rank];
        Note note = {(uint64_t)c->kind, (uint64_t)c->dtype, (uint64_t)c->op, (uint64_t)c->root, count, c->divisor, piece.bytes, 1};
        if (i / 2 != e->rank) open.push_back(start(e, i / 2, i % 2, piece, note, slot));
        else if (i % 2 == 0 && piece.bytes) memmove(piece.memory, own.memory, piece.bytes);
    }
    for (int tries = 0; !open.empty(); usleep(tries++ < 20 ? 0 : 50)) {
        open.erase(std::remove_if(open.begin(), open.end(), [&](const MessageRef &m) { return progress(e, m.get(), true); }), open.end());
        if (open.empty() || ddp_now() < deadline) continue;
        poison(NULL, e, DDP_ERR_TIMEOUT, ("timed out after " + std::to_string(e->timeout_ms) + " ms: missing: rank " + std::to_string(open[0]->peer)).c_str());
        throw Stopped();
    }
}

ddp_result run(ddp_group *, void *state, const ddp_call *c) {
    Engine *e = (Engine *)state;
    ddp_call_kind k = c->kind;
    bool spreads = k == DDP_CALL_BROADCAST || k == DDP_CALL_SCATTER, blocks = k == DDP_CALL_SCATTER || k == DDP_CALL_ALL_TO_ALL || k == DDP_CALL_REDUCE_SCATTER;
    bool funnels = k == DDP_CALL_REDUCE || k == DDP_CALL_GATHER, reduces = k == DDP_CALL_ALL_REDUCE || k == DDP_CALL_REDUCE || k == DDP_CALL_REDUCE_SCATTER;
    bool gives = !spreads || e->rank == c->root, takes = !funnels || e->rank == c->root;
    size_t s = ddp_dtype_size(c->dtype), w = (size_t)e->size, root = (size_t)c->root, n = k == DDP_CALL_BARRIER ? 0 : c->count;
    return guarded(e, [&] {
        std::vector<char> all(reduces && takes ? w * n * s : 0);
        std::vector<Piece> give(w), take(w);
        std::vector<const void *> sources(w);
        char *send = k == DDP_CALL_BROADCAST ? (char *)c->recv : (char *)(uintptr_t)c->send, *recv = reduces ? all.data() : (char *)c->recv;
        for (size_t r = 0; r < w; r++) {
            give[r] = {send + (blocks ? r * n * s : 0), gives && (!funnels || r == root) ? n * s : 0};
            take[r] = {recv + (spreads ? 0 : r * n * s), takes && (!spreads || r == root) ? n * s : 0};
            sources[r] = take[r].memory;
            if (!c->recv_counts) continue;
            give[r] = {send + (c->send_counts ? c->send_offsets[r] * s : 0), (c->send_counts ? c->send_counts[r] : c->recv_counts[e->rank]) * s};
            take[r] = {recv + c->recv_offsets[r] * s, c->recv_counts[r] * s};
        }
        exchange(e, c, c->recv_counts ? 0 : n, give, take);
        if (reduces && takes) ddp_reduce_tree(c->recv, sources.data(), e->size, n, c->dtype, c->op, c->divisor);
    });
}

//== groups and memory ======================================================================

/* Rank r of group, which is NULL where this rank is in none, is rank members[r] of over. A card has a rank's address for each other rank. */
ddp_result meet(ddp_group *group, ddp_group *over, const int *members, std::shared_ptr<gloo::transport::Device> device, void **state) {
    size_t w = group ? (size_t)ddp_world_size(group) : 0, card = (size_t)ddp_world_size(over) * cell;
    std::vector<char> mine(card), all(card * (size_t)ddp_world_size(over));
    std::unique_ptr<Engine> engine(new Engine());
    Engine *e = engine.get();
    ddp_call barrier = {};
    ddp_result result = guarded(e, [&] {
        signal(SIGPIPE, SIG_IGN); // Gloo writes to connections that a peer may have closed
        gloo::transport::tcp::attr attr;
        attr.iface = "lo";
        e->device = device ? device : gloo::transport::tcp::CreateDevice(attr);
        e->context = e->device->createContext(e->rank = ddp_rank(group), e->size = (int)w);
        e->context->setTimeout(std::chrono::milliseconds(e->timeout_ms = ddp_group_timeout_ms(over)));
        e->mark = buffer(e, "\1", 1);
        e->alarms.resize(w);
        for (size_t r = 0; r < w; r++) {
            if ((int)r == e->rank) continue;
            std::vector<char> address = e->context->createPair((int)r)->address().bytes();
            memcpy(&mine[r * cell], address.data(), address.size());
        }
        ddp_result gathered = ddp_all_gather(over, mine.data(), all.data(), card, DDP_U8, NULL);
        if (gathered != DDP_OK) poison(NULL, e, gathered, ddp_last_error());
        for (size_t r = 0; r < w && gathered == DDP_OK; r++) {
            const char *address = &all[(members ? (size_t)members[r] : r) * card + (size_t)e->rank * cell];
            auto &pair = e->context->getPair(peer = (int)r);
            if (peer != e->rank) pair->connect(std::vector<char>(address, address + pair->address().bytes().size()));
            e->bells.push_back(buffer(e, peer == e->rank ? &e->alarm : &e->alarms[r], sizeof(Alarm)));
            if (peer != e->rank) e->bells[r]->recv(peer, alarm_slot);
        }
        if (gathered == DDP_OK) exchange(e, &barrier, 0, std::vector<Piece>(w), std::vector<Piece>(w)); // nobody leaves before all are connected
    });
    if (result != DDP_OK || status(NULL, e) != DDP_OK) return status(NULL, e);
    *state = group ? engine.release() : NULL;
    return DDP_OK;
}

ddp_result open(ddp_group *group, void **state) {
    ddp_group *control = (ddp_group *)ddp_group_backend_user(group);
    return control ? meet(group, control, NULL, nullptr, state) : ddp_fail(DDP_ERR_INVALID, "gloo: open it over a control group, see ddp_group_create_on");
}

ddp_result split(ddp_group *parent, void *state, ddp_group *child, const int *members, int, void **child_state) {
    return meet(child, parent, members, ((Engine *)state)->device, child_state);
}

void close(ddp_group *group, void *state) {
    std::unique_ptr<Engine> e((Engine *)state);
    const std::chrono::seconds patience(1); // what others wait for leaves first
    try {
        for (; e->rung > 0; e->rung--) e->bells[(size_t)e->rank]->waitSend(patience);
        for (; e->alarm.cause == DDP_OK && e->marks > 0; e->marks--) e->mark->waitSend(patience);
    } catch (const std::exception &) { /* who waits has gone */ }
    for (void *memory : e->memory) ddp_group_mfree(group, memory);
}

ddp_result alloc(ddp_group *group, void *state, size_t size_bytes, void **out) {
    *out = ddp_group_malloc(group, size_bytes);
    if (!*out) return DDP_ERR_NO_MEMORY;
    ((Engine *)state)->memory.insert(memset(*out, 0, size_bytes));
    return DDP_OK;
}

ddp_result release(ddp_group *group, void *state, void *memory) {
    if (!((Engine *)state)->memory.erase(memory)) return ddp_fail(DDP_ERR_INVALID, "gloo: %p is not memory of this group", memory);
    ddp_group_mfree(group, memory);
    return DDP_OK;
}

const ddp_backend backend = {"gloo", open, run, p2p_start, p2p_poll, NULL, split, alloc, release, status, poison, close, 0, DDP_ORDER_TREE, NULL, NULL};

} // namespace

extern "C" const ddp_backend *gloo_backend(void) { return &backend; }

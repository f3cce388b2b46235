/*  gloo_backend.cc - Gloo as a backend of ddp.h, through >>spi alone: what it takes to plug in an engine that moves bytes between ranks.

    Gloo can wait for a buffer but not tell whether it is complete, so what is waited for ends with a mark in memory, which is looked at. A message is a
    note, compared with what the receiver expects, because Gloo ends the program when sizes differ; then the data; then a mark back to the sender.
    A collective is such a message to and from everybody. A reduction gathers what it needs and reduces that in tree order. The control group, of which
    a split makes another, is where ranks tell each other their addresses and failures, and where group memory comes from. */
#include "../../ddp.h"

#include <gloo/common/error.h>
#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/tcp/device.h>

#include <cstring>
#include <list>
#include <map>

#include <signal.h>
#include <unistd.h>

namespace {

using Buffer = std::unique_ptr<gloo::transport::UnboundBuffer>;
using Lock = std::lock_guard<std::recursive_mutex>;
struct Note { uint64_t kind, dtype, op, root, count, divisor, bytes, mark; };
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
using MessageRef = std::shared_ptr<Message>;
struct Stopped {}; // thrown once the group has failed

enum { NOTE, DATA, TAKEN }; // the lowest bits of a slot; then 29 of the message's number, 31 of its tag
const uint64_t of_collectives = (uint64_t)1 << 62; // in place of the tag
const size_t cell = gloo::transport::Address::kMaxByteSize;

struct Engine {
    ddp_group *control;
    bool owns; // control, which a split has made
    int rank, size, timeout_ms;
    std::shared_ptr<gloo::transport::Device> device;
    std::shared_ptr<gloo::transport::Context> context;
    std::recursive_mutex mutex; // of what follows
    Buffer mark;
    int marks; // sent so far
    std::list<MessageRef> receives; // not done yet
    std::map<std::pair<int, uint64_t>, uint64_t> numbers; // of messages to a rank, or from it (~rank), by what the slot says of them
    ~Engine() { if (owns) ddp_group_destroy(control); }
};

Buffer buffer(Engine *e, const void *memory, size_t bytes) { return e->context->createUnboundBuffer(const_cast<void *>(memory), bytes); }

//== failures ===============================================================================

void poison(ddp_group *, void *state, ddp_result cause, const char *text) { ddp_group_poison(((Engine *)state)->control, cause, text); }
ddp_result status(const ddp_group *, void *state) { return ddp_group_cause(((Engine *)state)->control); }

void fail(Engine *e, ddp_result cause, const std::string &text) {
    poison(NULL, e, cause, text.c_str());
    throw Stopped();
}

/* What is thrown inside becomes the cause, unless a rank has told another: those that fail also leave. */
template <class Body> ddp_result guarded(Engine *e, const int &peer, Body body) {
    try { body(); return DDP_OK; }
    catch (const Stopped &) {}
    catch (const gloo::IoException &x) { poison(NULL, e, DDP_ERR_PEER_LOST, ("rank " + std::to_string(peer) + ": Gloo: " + x.what()).c_str()); }
    catch (const std::exception &x) { poison(NULL, e, DDP_ERR_ENGINE, (std::string("Gloo: ") + x.what()).c_str()); }
    return DDP_ERR_POISONED;
}

//== messages ===============================================================================

MessageRef start(Engine *e, const ddp_call *c, int peer, bool sends, Piece piece, uint64_t slot) {
    Lock lock(e->mutex);
    bool single = slot != of_collectives;
    Note note = {(uint64_t)(single ? DDP_CALL_SEND : c->kind), (uint64_t)c->dtype, (uint64_t)c->op, single ? 0 : (uint64_t)c->root,
                 c->recv_counts ? 0 : c->count, c->divisor, piece.bytes, 1};
    slot |= (e->numbers[{sends ? peer : ~peer, slot}]++ & 0x1fffffff) << 2;
    MessageRef m(new Message{peer, sends, false, false, piece, slot, note, {}, std::vector<char>(piece.bytes + 1), 0, {}, {}, {}});
    m->first = buffer(e, sends ? &m->note : &m->theirs, sizeof note);
    m->second = buffer(e, m->data.data(), m->data.size());
    m->third = buffer(e, &m->mark, 1);
    if (!sends) {
        m->first->recv(peer, slot + NOTE);
        e->receives.push_back(m);
        return m;
    }
    if (piece.bytes) memcpy(m->data.data(), piece.memory, piece.bytes);
    m->data.back() = 1;
    m->third->recv(peer, slot + TAKEN);
    m->first->send(peer, slot + NOTE);
    m->second->send(peer, slot + DATA);
    return m;
}

/* Whether the mark that comes through this buffer is there. Throws when it will not come any more, if this is what is waited for. */
bool came(Engine *e, const Buffer &through, const void *mark, bool waits) {
    bool here = __atomic_load_n((const char *)mark, __ATOMIC_ACQUIRE) != 0;
    if (!here && !waits) return false;
    if (!here && status(NULL, e) != DDP_OK) throw Stopped();
    if (!here) through->abortWaitRecv(); // so that the wait ends at once, or throws what happened to the connection
    through->waitRecv();
    return here;
}

std::string words(int rank, const char *does, const Note &n) {
    return "rank " + std::to_string(rank) + does + std::to_string(n.bytes) + " bytes in " + ddp_call_name((ddp_call_kind)n.kind) + " " +
           ddp_dtype_name((ddp_dtype)n.dtype);
}

bool progress(Engine *e, Message *m, bool waits) {
    if (m->done) return true;
    if (m->sends) return m->done = came(e, m->third, &m->mark, waits);
    if (!m->compared && !came(e, m->first, &m->theirs.mark, waits)) return false;
    if (memcmp(&m->theirs, &m->note, sizeof m->note) != 0)
        fail(e, DDP_ERR_MISMATCH, words(m->peer, " sends ", m->theirs) + ", " + words(e->rank, " expects ", m->note));
    if (!m->compared) m->second->recv(m->peer, m->slot + DATA);
    m->compared = true;
    if (!came(e, m->second, &m->data.back(), waits)) return false;
    if (m->piece.bytes) memcpy(m->piece.memory, m->data.data(), m->piece.bytes);
    e->mark->send(m->peer, m->slot + TAKEN);
    e->marks++;
    return m->done = true;
}

/* A peer may be waiting for any of the receives here. */
bool poll(Engine *e, const MessageRef &message) {
    Lock lock(e->mutex);
    e->receives.remove_if([&](const MessageRef &m) { return progress(e, m.get(), false); });
    return progress(e, message.get(), true);
}

ddp_result p2p_start(ddp_group *, void *state, const ddp_call *c, void **request) {
    Engine *e = (Engine *)state;
    bool sends = c->kind == DDP_CALL_SEND;
    Piece piece = {sends ? (char *)(uintptr_t)c->send : (char *)c->recv, c->count * ddp_dtype_size(c->dtype)};
    return guarded(e, c->root, [&] { *request = new MessageRef(start(e, c, c->root, sends, piece, (uint64_t)c->tag << 31)); });
}

ddp_result p2p_poll(ddp_group *, void *state, void *request, int *done) {
    Engine *e = (Engine *)state;
    MessageRef *m = (MessageRef *)request;
    ddp_result result = guarded(e, (*m)->peer, [&] { *done = poll(e, *m); });
    if (*done || result != DDP_OK) delete m;
    return result;
}

//== collectives ============================================================================

ddp_result run(ddp_group *, void *state, const ddp_call *c) {
    Engine *e = (Engine *)state;
    ddp_call_kind k = c->kind;
    bool spreads = k == DDP_CALL_BROADCAST || k == DDP_CALL_SCATTER, blocks = k == DDP_CALL_SCATTER || k == DDP_CALL_ALL_TO_ALL || k == DDP_CALL_REDUCE_SCATTER;
    bool funnels = k == DDP_CALL_REDUCE || k == DDP_CALL_GATHER, reduces = k == DDP_CALL_ALL_REDUCE || k == DDP_CALL_REDUCE || k == DDP_CALL_REDUCE_SCATTER;
    bool gives = !spreads || e->rank == c->root, takes = !funnels || e->rank == c->root;
    size_t s = ddp_dtype_size(c->dtype), w = (size_t)e->size, root = (size_t)c->root, me = (size_t)e->rank, bytes = k == DDP_CALL_BARRIER ? 0 : c->count * s;
    double deadline = ddp_now() + e->timeout_ms * 1e-3;
    int peer = 0;
    return guarded(e, peer, [&] {
        std::vector<char> all(reduces && takes ? w * bytes : 0);
        std::vector<const void *> sources(w);
        std::vector<MessageRef> open;
        char *send = k == DDP_CALL_BROADCAST ? (char *)c->recv : (char *)(uintptr_t)c->send, *recv = reduces ? all.data() : (char *)c->recv;
        for (size_t r = 0; r < w; r++) {
            Piece give = {send + (blocks ? r * bytes : 0), gives && (!funnels || r == root) ? bytes : 0};
            Piece take = {recv + (spreads ? 0 : r * bytes), takes && (!spreads || r == root) ? bytes : 0};
            if (c->recv_counts) {
                give = {send + (c->send_counts ? c->send_offsets[r] * s : 0), (c->send_counts ? c->send_counts[r] : c->recv_counts[me]) * s};
                take = {recv + c->recv_offsets[r] * s, c->recv_counts[r] * s};
            }
            sources[r] = take.memory;
            peer = (int)r;
            if (r == me && take.bytes) memmove(take.memory, give.memory, take.bytes);
            if (r != me) open.insert(open.end(), {start(e, c, peer, false, take, of_collectives), start(e, c, peer, true, give, of_collectives)});
        }
        for (const MessageRef &m : open)
            for (int tries = 0; peer = m->peer, !poll(e, m); usleep(tries++ < 20 ? 0 : 50))
                if (ddp_now() > deadline) fail(e, DDP_ERR_TIMEOUT, "timed out after " + std::to_string(e->timeout_ms) + " ms: missing: rank " + std::to_string(peer));
        if (reduces && takes) ddp_reduce_tree(c->recv, sources.data(), e->size, c->count, c->dtype, c->op, c->divisor);
    });
}

//== groups and memory ======================================================================

/* control has the same ranks. A card has a rank's address for each other rank. */
ddp_result meet(ddp_group *control, bool owns, std::shared_ptr<gloo::transport::Device> device, void **state) {
    size_t w = (size_t)ddp_world_size(control), card = w * cell;
    std::vector<char> mine(card), all(card * w);
    Engine *e = new Engine();
    ddp_call barrier = {};
    int peer = -1;
    *state = e;
    e->control = control, e->owns = owns;
    ddp_result result = guarded(e, peer, [&] {
        signal(SIGPIPE, SIG_IGN); // Gloo writes to connections that a peer may have closed
        gloo::transport::tcp::attr attr;
        attr.iface = "lo";
        e->device = device ? device : gloo::transport::tcp::CreateDevice(attr);
        e->context = e->device->createContext(e->rank = ddp_rank(control), e->size = (int)w);
        e->context->setTimeout(std::chrono::milliseconds(e->timeout_ms = ddp_group_timeout_ms(control)));
        e->mark = buffer(e, "\1", 1);
        for (int r = 0; r < (int)w; r++)
            if (r != e->rank) { auto bytes = e->context->createPair(r)->address().bytes(); memcpy(&mine[(size_t)r * cell], bytes.data(), bytes.size()); }
        if (ddp_all_gather(control, mine.data(), all.data(), card, DDP_U8, NULL) != DDP_OK) throw Stopped();
        for (peer = 0; peer < (int)w; peer++) {
            const char *address = &all[(size_t)peer * card + (size_t)e->rank * cell];
            auto &pair = e->context->getPair(peer);
            if (peer != e->rank) pair->connect(std::vector<char>(address, address + pair->address().bytes().size()));
        }
    });
    barrier.kind = DDP_CALL_BARRIER;
    if (result == DDP_OK) result = run(NULL, e, &barrier); // nobody leaves before all are connected
    if (result == DDP_OK) return DDP_OK;
    result = status(NULL, e);
    delete e;
    return result;
}

ddp_result open(ddp_group *group, void **state) { return meet((ddp_group *)ddp_group_backend_user(group), false, nullptr, state); }

ddp_result split(ddp_group *, void *state, ddp_group *child, const int *members, int, void **child_state) {
    Engine *e = (Engine *)state;
    ddp_group *control = NULL;
    ddp_result result = ddp_group_split(e->control, child ? members[0] : -1, child ? ddp_rank(child) : 0, &control);
    return result == DDP_OK && child ? meet(control, true, e->device, child_state) : result;
}

void close(ddp_group *, void *state) {
    std::unique_ptr<Engine> e((Engine *)state);
    try { for (; status(NULL, state) == DDP_OK && e->marks > 0; e->marks--) e->mark->waitSend(std::chrono::seconds(1)); } // what others wait for leaves first
    catch (const std::exception &) { /* who waits has gone */ }
}

ddp_result alloc(ddp_group *, void *state, size_t size_bytes, void **out) { return ddp_group_alloc(((Engine *)state)->control, size_bytes, out); }
ddp_result release(ddp_group *, void *state, void *memory) { return ddp_group_free(((Engine *)state)->control, memory); }

const ddp_backend backend = {"gloo", open, run, p2p_start, p2p_poll, NULL, split, alloc, release, status, poison, close, 0, DDP_ORDER_TREE, NULL, NULL, NULL, NULL, NULL};

} // namespace

extern "C" const ddp_backend *gloo_backend(void) { return &backend; }

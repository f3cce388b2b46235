/*  peer_gloo.cc - all_reduce of bench.h with Gloo over loopback TCP. Started by run.sh; forks its own ranks.

    --setting ring      the algorithm of PyTorch's DDP over Gloo: the ring in 1 MiB segments
    --setting halving   recursive halving and doubling
    Both use asynchronous sockets. On blocking sockets (Gloo's busy polling) both ranks of the 25 MiB exchange
    can wait to write while neither reads.
*/
#include "bench.h"

#include <gloo/allreduce.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <map>
#include <memory>
#include <string>

struct gloo_user {
    std::shared_ptr<gloo::rendezvous::Context> context;
    std::map<size_t, std::unique_ptr<gloo::Algorithm>>
        algorithm; // per size; created once, as Gloo's own benchmark does
    float *data;
    bool halving;
};

static int gloo_supports(void *, const bench_cell *cell, int) {
    return cell->op == BENCH_ALL_REDUCE && cell->bytes <= ((size_t)64 << 20);
}

static int gloo_run(void *user, const bench_cell *cell, int, int calls) {
    gloo_user *u = (gloo_user *)user;
    size_t count = cell->bytes / sizeof(float);
    if (u->halving) {
        for (int i = 0; i < calls; i++) u->algorithm[count]->run();
        return 0;
    }
    for (int i = 0; i < calls; i++) {
        gloo::AllreduceOptions options(u->context);
        options.setOutput(u->data, count);
        options.setReduceFunction(
            static_cast<void (*)(void *, const void *, const void *, size_t)>(&gloo::sum<float>));
        options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
        gloo::allreduce(options);
    }
    return 0;
}

static void prepare_halving(gloo_user *u, bench *b) {
    for (int c = 0; c < b->cell_count; c++) {
        if (!bench_wanted(b, &b->cell[c]) || !gloo_supports(u, &b->cell[c], 0)) continue;
        size_t count = b->cell[c].bytes / sizeof(float);
        u->algorithm[count].reset(
            new gloo::AllreduceHalvingDoubling<float>(u->context, std::vector<float *>{u->data}, (int)count));
    }
}

static int rank_main(bench *b, int rank) {
    gloo_user u;
    gloo::transport::tcp::attr attr;
    attr.iface = "lo";
    auto device = gloo::transport::tcp::CreateDevice(
        attr); // its thread starts before this one is pinned, so it can run on any core
    bench_join(b, rank);
    gloo::rendezvous::FileStore store(std::string(b->share_path) + ".store." + b->setting);
    u.context = std::make_shared<gloo::rendezvous::Context>(rank, b->rank_count);
    u.context->connectFullMesh(store, device);
    u.halving = strcmp(b->setting, "halving") == 0;
    bench_driver d;
    memset(&d, 0, sizeof d);
    d.user = &u;
    d.kind_count = 1;
    d.supports = gloo_supports;
    d.run = gloo_run;
    d.data[0] = u.data = bench_private(b, bench_largest(b));
    if (u.halving) prepare_halving(&u, b);
    bench_run(b, &d);
    return 0;
}

int main(int argc, char **argv) {
    bench b;
    bench_arguments(&b, argc, argv);
    if (b.cell_count == 0) return 0;
    mkdir((std::string(b.share_path) + ".store." + b.setting).c_str(), 0700);
    int failed = 0, status;
    for (int rank = 0; rank < b.rank_count; rank++) {
        if (fork() != 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int result = 1;
        try {
            result = rank_main(&b, rank);
        } catch (const std::exception &error) {
            bench_die(&b, error.what());
        }
        _exit(result);
    }
    while (wait(&status) > 0) failed |= status;
    return failed != 0;
}

/*  train_gpt_cuda.cu - the trainer of examples/gpt/train_gpt_cuda.cu on the fake GPU of fake_gpu.h, including
    kernels. A part of gpt_tests.cu, with which it shares the kernels.

    Its command line is that of the trainer; several ranks need --threads-as-ranks. Environment:
    DDP_TEST_GPUS, the number of GPUs (4); DDP_TEST_SEED, the order of streams (1); DDP_TEST_ROOM, the real
    MiB of the first GPU (4,096). Status 3, with lines on stderr: wrong order on the GPU; anything left after
    a successful run; unless ranks share a GPU, a call that waits for the device where the trainer promises
    not to wait. The last line of stderr has the number of checked halves of steps, the graphs they launched,
    the products outside of graphs, the bytes that the first GPU passed to ncclReduceScatter and ncclSend, the
    maximum memory of the first GPU, and the maximum KiB of host memory. */
#define SAMPLE_BYTES 8
#define VALIDATION_WINDOWS 8

static bool begins(const std::string &text, const char *name) {
    return text.compare(0, strlen(name), name) == 0;
}

/* A call that makes this thread wait for the device, among those of the record. */
static bool waits(const std::string &text) {
    static const char *const names[] = {"cudaStreamSynchronize(",
                                        "cudaEventSynchronize(",
                                        "cudaDeviceSynchronize(",
                                        "cudaMalloc(",
                                        "cudaFree(",
                                        "cudaHostAlloc(",
                                        "cudaFreeHost("};
    for (const char *name : names)
        if (begins(text, name)) return true;
    return begins(text, "cudaMemcpyAsync(") && text.find("host") != std::string::npos;
}

/* The bytes that a line of the record passes to ncclReduceScatter or ncclSend; otherwise 0. */
static size_t reduced_by(const std::string &text) {
    if (!begins(text, "ncclReduceScatter(") && !begins(text, "ncclSend(")) return 0;
    for (size_t at = text.find(", "); at != std::string::npos; at = text.find(", ", at + 2)) {
        size_t count;
        char dtype[8];
        if (sscanf(text.c_str() + at, ", %zu %7[a-z0-9]", &count, dtype) != 2) continue;
        if (!strcmp(dtype, "f32")) return 4 * count;
        return !strcmp(dtype, "bf16") || !strcmp(dtype, "f16") ? 2 * count : count;
    }
    return 0;
}

static int steps_watched, steps_waited, graphs_launched, products_launched;
static size_t reduced;
static thread_local int watched;
struct watcher {
    size_t from;
    watcher() {
        pthread_mutex_lock(&fake.lock);
        from = fake.lines.size();
        pthread_mutex_unlock(&fake.lock);
    }
    template <class T> T end(T result) {
        pthread_mutex_lock(&fake.lock);
        if (++watched > 4) steps_watched++; /* two steps: memory is found, graphs are captured */
        for (size_t i = from; i < fake.lines.size() && watched > 4; i++) {
            const std::string &text = fake.lines[i].text;
            if (fake.lines[i].device != fake_me.device) continue;
            graphs_launched += begins(text, "cudaGraphLaunch("),
                products_launched += begins(text, "cublasLtMatmul(");
            if (fake_me.device == 0) reduced += reduced_by(text);
            if (waits(text) && steps_waited++ < 3 && !getenv("DDP_TEST_GPUS"))
                fprintf(stderr, "inside of a step: %s\n", text.c_str());
        }
        pthread_mutex_unlock(&fake.lock);
        return result;
    }
};
#define WITHOUT_WAITING(call) \
    ([&] {                    \
        watcher w;            \
        return w.end(call);   \
    }())

#define main trainer_main
#include "../../examples/gpt/train_gpt_cuda.cu"
#undef main

static int train_gpt_cuda(int argc, char **argv) {
    const char *gpus = getenv("DDP_TEST_GPUS"), *seed = getenv("DDP_TEST_SEED"),
               *room = getenv("DDP_TEST_ROOM");
    int status, wrong;
    fake_start(gpus ? atoi(gpus) : 4, seed ? (uint64_t)atoi(seed) : 1);
    if (room) fake.device[0].taken = fake.device[0].total - ((size_t)atoi(room) << 20);
    status = trainer_main(argc, argv);
    fflush(stdout);
    if (status != 0) return status;
    std::string left = fake_left();
    if (gpus) steps_waited = 0; /* staged groups wait */
    wrong = fake_failures() + steps_waited + !left.empty();
    if (!left.empty()) printf("left behind:\n%s", left.c_str());
    if (wrong) fprintf(stderr, "train_gpt_cuda: %d things are out of order on the machine\n", wrong);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    fprintf(stderr, "watched %d, graphs %d, products %d, reduced %zu, held %zu, resident %ld\n",
            steps_watched, graphs_launched, products_launched, reduced, fake.device[0].most, usage.ru_maxrss);
    return wrong ? 3 : 0;
}

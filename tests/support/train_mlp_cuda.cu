/*  train_mlp_cuda.cu - examples/train_mlp_cuda.cu on the fake GPU of fake_gpu.h. A part of gpt_tests.cu.

    CMake makes the two copies that this file includes. on_cpu.sed makes the data set small. It turns launches
    into LAUNCH, and the pointers of kernels into kernel_pointer. In the second copy each line marked
    "fsdp: CODE" is CODE.

    A launch runs its blocks and threads one after the other, when the stream reaches it. The fake GPU checks
    the range that it accesses through each pointer: bounds of the allocation, races with other streams. */
#if defined(__GNUC__) && !defined(__clang__) && !defined(__OPTIMIZE__)
#pragma GCC push_options
#pragma GCC optimize("O2")
#define TRAIN_MLP_POP_OPTIONS
#endif

/* A pointer of a kernel, and the range of its elements that the launch has accessed. */
template <class T> struct kernel_pointer {
    struct range {
        long low, high;
    };
    T *data;
    range *seen;
    T &operator[](long i) const {
        if (i < seen->low) seen->low = i;
        if (i > seen->high) seen->high = i;
        return data[i];
    }
};

/* An argument of a launch, as its kernel gets it. */
template <class P> struct kernel_argument {
    P value;
    template <class A> kernel_argument(const A &given) : value((P)given) {}
    P get() { return value; }
};
template <class T> struct kernel_argument<kernel_pointer<T>> {
    T *data;
    typename kernel_pointer<T>::range seen;
    template <class A> kernel_argument(const A &given) : data(given), seen() {
        seen.low = 1L << 40;
        seen.high = -1;
    }
    kernel_pointer<T> get() { return {data, &seen}; }
    ~kernel_argument() {
        if (seen.high >= 0) fake_seen(data + seen.low, (size_t)(seen.high - seen.low + 1) * sizeof(T));
    }
};

struct kernel_shape {
    dim3 grid, block;
    kernel_shape(int blocks, int threads) : grid((unsigned)blocks), block((unsigned)threads) {}
};

template <class... P> static void kernel_run(void (*kernel)(P...), kernel_argument<P>... arguments) {
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) kernel(arguments.get()...);
}

template <class... P, class... A>
static void kernel_launch(const char *name, void (*kernel)(P...), kernel_shape shape, A... given) {
    FAKE_CALL(0, "cudaLaunchKernel(%s, %u, %u)", name, shape.grid.x, shape.block.x);
    int line = call.line;
    std::function<void()> body = [=] {
        gridDim = shape.grid;
        blockDim = shape.block;
        blockIdx = threadIdx = uint3();
        kernel_run<P...>(kernel, kernel_argument<P>(given)...);
    };
    fake_enqueue_work(0, line, {}, [body, line] {
        fake_run_loop([](void *run) { (*(const std::function<void()> *)run)(); }, (void *)&body, line);
    });
}
#define LAUNCH(kernel, shape, ...) kernel_launch(#kernel, kernel, kernel_shape shape, __VA_ARGS__)

/* The lines that the example prints. */
static std::string train_mlp_printed;
static void train_mlp_print(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void train_mlp_print(const char *format, ...) {
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    printf("%s", text);
    train_mlp_printed += text;
}

#undef DDP_USE_CUBLASLT /* the examples define it */
#define main example_main
#define ddp_launch launch_threads
#define printf train_mlp_print
namespace train_mlp_ddp {
#include DDP_TEST_TRAIN_MLP_DDP
}
#undef DDP_USE_CUBLASLT
namespace train_mlp_fsdp {
#include DDP_TEST_TRAIN_MLP_FSDP
}
#undef printf
#undef ddp_launch
#undef main
#if defined(TRAIN_MLP_POP_OPTIONS)
#pragma GCC pop_options
#endif

/* Writes the files of a small data set, as large as in the copies: noise, and a bright stripe at the height
   of the label. last: the last label. */
static const char *const train_mlp_files[] = {"train-images-idx3-ubyte", "train-labels-idx1-ubyte",
                                              "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"};
static std::string train_mlp_folder(int last) {
    char folder[] = "train_mlp_XXXXXX";
    uint32_t random = 1;
    int failed = !mkdtemp(folder);
    for (int f = 0; f < 4 && !failed; f++) {
        int count = f < 2 ? train_mlp_ddp::TRAIN : train_mlp_ddp::TEST;
        FILE *file = fopen((std::string(folder) + "/" + train_mlp_files[f]).c_str(), "wb");
        for (int i = 0; i < (f % 2 ? 8 : 16); i++) fputc(0, file);
        for (int i = 0; i < count && f % 2; i++) fputc(i < count - 1 ? i % 10 : last, file);
        for (int i = 0; i < count && f % 2 == 0; i++)
            for (int p = 0; p < 784; p++) {
                random = random * 1664525 + 1013904223;
                fputc((int)(random >> 25) + (p / 56 == i % 10 + 2 ? 60 : 0), file);
            }
        failed |= fclose(file);
    }
    return failed ? "" : folder;
}

static void train_mlp_remove(const std::string &folder) {
    for (const char *file : train_mlp_files) unlink((folder + "/" + file).c_str());
    rmdir(folder.c_str());
}

/* Runs an example on 4 fake GPUs. Returns the number of violations of order, and of objects left. */
static int train_mlp_run(int (*example)(int, char **), std::vector<const char *> words, int *status) {
    static uint64_t seed;
    std::vector<std::string> texts(words.begin(), words.end()); /* the example writes into its arguments */
    std::vector<char *> arguments;
    texts.insert(texts.begin(), "train_mlp_cuda");
    for (std::string &text : texts) arguments.push_back(&text[0]);
    arguments.push_back(NULL);
    fake_start(4, ++seed);
    train_mlp_printed = "";
    *status = example((int)texts.size(), arguments.data());
    std::string left = fake_left();
    if (!left.empty()) printf("left behind:\n%s", left.c_str());
    return fake_failures() + !left.empty();
}

/* Trains: every number of ranks ends with the same weights and losses, and the loss falls. A list "-" is no
   list: one GPU, and synthetic data. The others read files. */
static int train_mlp_trains(const char *name, int (*example)(int, char **), std::vector<const char *> lists) {
    std::string first, folder = train_mlp_folder(1);
    int wrong = 0;
    for (const char *list : lists) {
        int status;
        printf("%s --gpus %s\n", name, list);
        if (strcmp(list, "-") == 0)
            wrong += train_mlp_run(example, {}, &status);
        else
            wrong += train_mlp_run(example, {"--gpus", list, folder.c_str()}, &status);
        size_t begin = train_mlp_printed.find("loss "), end = train_mlp_printed.rfind("loss ");
        if (status || train_mlp_printed.find("weights ") == std::string::npos || begin == end) {
            printf("FAIL status %d: %s\n", status, ddp_last_error());
            return wrong + 1;
        }
        double before = atof(train_mlp_printed.c_str() + begin + 5),
               after = atof(train_mlp_printed.c_str() + end + 5);
        if (!(after < 0.7 * before) && ++wrong)
            printf("FAIL the loss falls only from %g to %g\n", before, after);
        if (strcmp(list, "-") == 0) continue;
        if (first.empty()) first = train_mlp_printed;
        if (first != train_mlp_printed && ++wrong) printf("FAIL other losses or weights\n");
    }
    train_mlp_remove(folder);
    return wrong;
}

/* Bad input: an error line that contains `expected`. */
static int train_mlp_refuses(std::vector<const char *> words, const char *expected) {
    int status, wrong = train_mlp_run(train_mlp_ddp::example_main, words, &status);
    if (status && strstr(ddp_last_error(), expected)) return wrong;
    printf("FAIL status %d, '%s' does not contain '%s'\n", status, ddp_last_error(), expected);
    return wrong + 1;
}

/* "ddp 0 0,1": trains on the GPUs of each list. Without arguments: bad input. */
static int train_mlp_cuda(int argc, char **argv) {
    const char *strategy = argc > 1 ? argv[1] : "";
    std::vector<const char *> gpus(argv + (argc > 2 ? 2 : argc), argv + argc);
    if (strcmp(strategy, "ddp") == 0) return train_mlp_trains("ddp", train_mlp_ddp::example_main, gpus);
    if (strcmp(strategy, "fsdp") == 0) return train_mlp_trains("fsdp", train_mlp_fsdp::example_main, gpus);
    std::string folder = train_mlp_folder(10);
    const char *data = folder.c_str(),
               *usage = "usage: train_mlp_cuda [--gpus 0,1] [FOLDER]: 1, 2, 4 or 8 GPUs";
    const char *lists[] = {"0,1,2", "", "x", ",", "0,x", "0 1", "-1", "0,1,2,3,0,1,2,3,0", "+1"};
    int wrong = train_mlp_refuses({"--gpus", "0,4"},
                                  "device 4 does not exist on this machine, which has 0 (Fake 0)");
    for (const char *list : lists) wrong += train_mlp_refuses({"--gpus", list}, usage);
    wrong += train_mlp_refuses({"--gpus", "0", data, "more"}, usage);
    wrong += train_mlp_refuses({data, "0"}, usage);
    wrong += train_mlp_refuses({"/missing"},
                               "/missing/train-images-idx3-ubyte is missing, or not a file of MNIST");
    wrong += train_mlp_refuses({data}, "a label is not below 10");
    if (truncate((folder + "/t10k-labels-idx1-ubyte").c_str(), 20)) wrong++;
    wrong += train_mlp_refuses({data}, "/t10k-labels-idx1-ubyte is missing, or not a file of MNIST");
    train_mlp_remove(folder);
    return wrong;
}

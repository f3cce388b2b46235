/*  gpt_tests.cu - the tests of the GPT's kernels and model on the fake GPU as one program, as in
    cuda_tests.cu.

    gpt_tests NAME [its arguments]       gpt and attention are those of tests/gpu, fake_kernel is
                                         test_fake_kernel.cu, step_cuda is the example,
                                         train_mlp_cuda is train_mlp_cuda.cu, bench_gpt is the program of
                                         bench/gpu, except with sanitizers.
    Under the name train_gpt_cuda the program is that trainer, except with sanitizers. */
#define DDP_TEST_ON_CPU
#include "host_only.h"
#include "device.h"
#include "fake_cuda_names.h"
#include "fake_kernel.h"
#include "random.h"
#include "../../examples/gpt/gpt_cuda.cuh"
#include "../../examples/gpt/options.h"

#define main test_main
namespace gpt_model_tests {
#include "../gpu/test_gpt.cu"
}
namespace attention_tests {
#include "../gpu/test_attention.cu"
}
#undef RUN
#undef CHECK
#undef CASE
namespace kernel_tests {
#include "test_fake_kernel.cu"
}
#undef main
/* The fake GPU belongs to one process, so the ranks of the example are threads. */
static ddp_result launch_threads(const ddp_launch_desc *desc, ddp_result (*fn)(ddp_group *, void *),
                                 void *user) {
    ddp_launch_desc threads = *desc;
    threads.mode = DDP_LAUNCH_THREADS;
    return ddp_launch(&threads, fn, user);
}
#define main example_main
#define ddp_launch launch_threads
namespace step_cuda {
#include "../../examples/step_cuda.cu"
}
#undef ddp_launch
#undef main
#include "train_mlp_cuda.cu"
#if !defined(__SANITIZE_ADDRESS__)
#define main bench_main
namespace bench_gpt {
#include "../../bench/gpu/bench_gpt.cu"
}
#undef main
#undef CUDA
#include "train_gpt_cuda.cu"
#endif

/* A program on the fake GPU: its arguments, and no call out of order, no memory left. */
static int run_named(int (*program)(int argc, char **argv), int argc, char **argv) {
    fake_start(1, 1); /* one GPU, which several ranks share through host memory */
    int status = program(argc, argv);
    std::string left = fake_left();
    if (!left.empty()) printf("left behind:\n%s", left.c_str());
    return status + fake_failures() + !left.empty();
}

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "";
#if !defined(__SANITIZE_ADDRESS__)
    const char *called = strrchr(argv[0], '/');
    if (strcmp(called ? called + 1 : argv[0], "train_gpt_cuda") == 0) {
        fake_rounds = 1;
        return train_gpt_cuda(argc, argv);
    }
    if (strcmp(name, "bench_gpt") == 0) return run_named(bench_gpt::bench_main, argc - 1, argv + 1);
#else
    fake_rounds = strcmp(name, "gpt") == 0; /* the plain flavour checks its numbers */
#endif
    argc--;
    argv++;
    if (strcmp(name, "gpt") == 0) return gpt_model_tests::test_main(argc, argv);
    if (strcmp(name, "attention") == 0) return attention_tests::test_main();
    if (strcmp(name, "fake_kernel") == 0) return kernel_tests::test_main();
    if (strcmp(name, "step_cuda") == 0) return run_named(step_cuda::example_main, argc, argv);
    if (strcmp(name, "train_mlp_cuda") == 0) return train_mlp_cuda(argc, argv);
    printf(
        "gpt_tests: no test is called '%s'; use gpt, attention, fake_kernel, step_cuda or train_mlp_cuda\n",
        name);
    return 2;
}

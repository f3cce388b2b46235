/*  gpt_tests.cu - the tests of the GPT's kernels and model on the fake GPU as one program, as in
    cuda_tests.cu.

    gpt_tests NAME [its arguments]       gpt and attention are those of tests/gpu, fake_kernel is
                                         test_fake_kernel.cu.
    Under the name train_gpt_cuda the program is that trainer, except with sanitizers. */
#define DDP_TEST_ON_CPU
#include "host_only.h"
#include "device.h"
#include "fake_cuda_names.h"
#include "fake_kernel.h"
#include "random.h"
#include "../../examples/gpt/gpt_cuda.cuh"

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
#if !defined(__SANITIZE_ADDRESS__)
#undef CUDA
#include "train_gpt_cuda.cu"
#endif

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "";
#if !defined(__SANITIZE_ADDRESS__)
    const char *called = strrchr(argv[0], '/');
    if (strcmp(called ? called + 1 : argv[0], "train_gpt_cuda") == 0) {
        fake_rounds = 1;
        return train_gpt_cuda(argc, argv);
    }
#else
    fake_rounds = strcmp(name, "gpt") == 0; /* the plain flavour checks its numbers */
#endif
    argc--;
    argv++;
    if (strcmp(name, "gpt") == 0) return gpt_model_tests::test_main(argc, argv);
    if (strcmp(name, "attention") == 0) return attention_tests::test_main();
    if (strcmp(name, "fake_kernel") == 0) return kernel_tests::test_main();
    printf("gpt_tests: no test is called '%s'; there are gpt, attention and fake_kernel\n", name);
    return 2;
}

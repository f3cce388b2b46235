/*  gpt_tests.cu - the tests of the GPT's kernels and model on the fake machine as one program, as cuda_tests.cu.

    gpt_tests NAME [its arguments]       gpt and attention are those of tests/gpu. */
#define DDP_TEST_ON_CPU
#include "host_only.h"
#include "device.h"
#include "fake_cuda_names.h"
#include "fake_kernel.h"
#include "random.h"
#include "../../examples/gpt_cuda.cuh"

#define main test_main
namespace gpt_model_tests {
#include "../gpu/test_gpt.cu"
}
namespace attention_tests {
#include "../gpu/test_attention.cu"
}
#undef main

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "";
    argc--;
    argv++;
    if (strcmp(name, "gpt") == 0) return gpt_model_tests::test_main(argc, argv);
    if (strcmp(name, "attention") == 0) return attention_tests::test_main();
    printf("gpt_tests: no test is called '%s'; there are gpt and attention\n", name);
    return 2;
}

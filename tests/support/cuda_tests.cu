/*  cuda_tests.cu - all tests on the fake GPU as one program, since most of their compile time is for shared
    code.

    cuda_tests NAME [its arguments]      conformance, groups, training, fsdp, tensor, layers and pipeline are
                                         those of tests/gpu, nccl is unit/test_cuda_nccl.cu, fake_gpu is
                                         test_fake_gpu.cu.
    Each file is in a namespace of its own, and also compiles as a separate program. */
#define DDP_TEST_ON_CPU
#include "host_only.h"
#include "device.h"
#include "../../ddp_fsdp.h"
#include "../../ddp_tensor.h"
#include "../../ddp_pipeline.h"
#include "relay.h"

#define main test_main
namespace conformance {
#include "../gpu/test_conformance.cu"
}
namespace groups {
#include "../gpu/test_groups.cu"
}
namespace training {
#include "../gpu/test_training.cu"
}
namespace fsdp {
#include "../gpu/test_fsdp.cu"
}
namespace tensors {
#include "../gpu/test_tensor.cu"
}
namespace pipelines {
#include "../gpu/test_pipeline.cu"
}
namespace layers {
#include "../gpu/test_layers.cu"
}
namespace nccl {
#include "../unit/test_cuda_nccl.cu"
}
#undef N
#undef CASE
namespace fake_gpu {
#include "test_fake_gpu.cu"
}
#undef main

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "";
    argc--;
    argv++;
    if (strcmp(name, "conformance") == 0) return conformance::test_main(argc, argv);
    if (strcmp(name, "groups") == 0) return groups::test_main(argc, argv);
    if (strcmp(name, "training") == 0) return training::test_main(argc, argv);
    if (strcmp(name, "fsdp") == 0) return fsdp::test_main(argc, argv);
    if (strcmp(name, "tensor") == 0) return tensors::test_main(argc, argv);
    if (strcmp(name, "pipeline") == 0) return pipelines::test_main(argc, argv);
    if (strcmp(name, "layers") == 0) return layers::test_main(argc, argv);
    if (strcmp(name, "nccl") == 0) return nccl::test_main(argc, argv);
    if (strcmp(name, "fake_gpu") == 0) return fake_gpu::test_main();
    printf("cuda_tests: no test is called '%s'; there are conformance, groups, training, fsdp, tensor, "
           "layers, pipeline, nccl and fake_gpu\n",
           name);
    return 2;
}

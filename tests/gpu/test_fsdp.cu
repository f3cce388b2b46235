/*  test_fsdp.cu - sharded training over device memory ends with the bits of one process on the CPU: parity/test_fsdp_parity.c, whose ranks
    have a group over device memory, staged or by NCCL.

    test_fsdp processes|threads [W ...]     Built with -DDDP_TEST_ON_CPU it runs on a fake machine, as test_conformance.cu. */
#include "../support/device.h"
#define FSDP_ON_DEVICE
#include "../parity/test_fsdp_parity.c"

/*  test_conformance.cu - every collective over device memory gives the bits of the CPU backends.

    test_conformance processes|threads|env [W ...]      as ranks/test_collectives.c, which it includes

    Ranks share the available devices: one GPU serves them all, staged through the host. Built with
    -DDDP_TEST_ON_CPU it runs without a device, on the fake GPU of support/fake_gpu.h: ordinary CI proves its
    own logic and that of the staging. */
#include "../support/device.h"
#define TEST_DEVICE
#if defined(DDP_TEST_ON_CPU) || defined(DDP_TEST_SMALL)
#define TEST_SLOW (4 * DDP_TEST_SLOWDOWN)
#endif
#if defined(DDP_TEST_ON_CPU)
#define TEST_LARGE_BYTES ((size_t)1 << 20)
#endif
#include "../ranks/test_collectives.c"

/*  test_conformance.cu - every collective over device memory gives the bits of the CPU backends.

    test_conformance processes|threads|env [W ...]      as ranks/test_collectives.c, which it includes

    Ranks share the devices there are: one GPU serves them all, staged through the host. Built with -DDDP_TEST_ON_CPU it runs without a
    device, on host memory: its own logic and that of the staging are proved in ordinary CI. Status 77: there is no device. */
#if defined(DDP_TEST_ON_CPU)
#include "../support/cuda_on_host.h"
#endif
#define DDP_IMPLEMENTATION
#include "../../ddp_cuda.cuh"
#if defined(DDP_TEST_ON_CPU)
#include "../support/cuda_on_host.h"
#endif
#include "../support/ranks.h"
#include "../support/device.h"
#define TEST_DEVICE
#include "../ranks/test_collectives.c"

/*  test_cuda_backend_user.cu - a group with ddp_device_cuda() over the user's own backend.

    ddp_group_desc.backend_user belongs to the backend. ddp_device_cuda() used it as the struct that
    ddp_cuda_group_create passes on. It read a device number and streams from the user's memory, and selected
    an invalid device. */
#define DDP_NO_NCCL
#include "../support/host_only.h"

struct ddp__cuda_runtime;
static const struct ddp__cuda_runtime *fake_runtime(void);
#define DDP__CUDA_RUNTIME fake_runtime()
#define DDP_CUDA_IMPLEMENTATION
#include "../../ddp_cuda.cuh"

const char *cudaGetErrorString(cudaError_t) { return "text"; }
const char *cudaGetErrorName(cudaError_t) { return "name"; }
static int selected = 3, destroyed; /* device of this thread; streams */

static cudaError_t fake_get_device(int *device) {
    *device = selected;
    return cudaSuccess;
}
static cudaError_t fake_set_device(int device) {
    selected = device;
    return cudaSuccess;
}
static cudaError_t fake_stream_create(cudaStream_t *out, int) {
    *out = (cudaStream_t)&destroyed;
    return cudaSuccess;
}
static cudaError_t fake_stream_destroy(cudaStream_t) {
    destroyed++;
    return cudaSuccess;
}
static const struct ddp__cuda_runtime *fake_runtime(void) {
    static ddp__cuda_runtime runtime = {};
    runtime.get_device = fake_get_device;
    runtime.set_device = fake_set_device;
    runtime.stream_create = fake_stream_create;
    runtime.stream_destroy = fake_stream_destroy;
    return &runtime;
}

/* A backend of one rank, without calls. */
static ddp_result own_open(ddp_group *group, void **state) {
    *state = ddp_group_backend_user(group);
    return DDP_OK;
}
static ddp_result own_run(ddp_group *, void *, const ddp_call *) { return DDP_OK; }
static ddp_result own_status(const ddp_group *, void *) { return DDP_OK; }
static void own_poison(ddp_group *, void *, ddp_result, const char *) {}
static void own_close(ddp_group *, void *) {}

int main(void) {
    static const ddp_backend own = {
        "own",      own_open,  own_run, NULL,           NULL, NULL, NULL, NULL, NULL, own_status,
        own_poison, own_close, 0,       DDP_ORDER_TREE, NULL, NULL, NULL, NULL, NULL,
    };
    ddp_group_desc alone = DDP_ZERO, desc = DDP_ZERO;
    ddp_group *control = NULL, *group = NULL;
    alone.world_size = 1;
    desc.backend = &own;
    desc.device = ddp_device_cuda();
    for (int given = 0; given < 2; given++) { /* without backend_user it is control */
        unsigned char users[64];
        memset(users, 0x5a, sizeof users);
        desc.backend_user = given ? users : NULL;
        if (ddp_group_create(&control, &alone) != DDP_OK
            || ddp_group_create_on(&group, control, &desc) != DDP_OK) {
            fprintf(stderr, "%s\n", ddp_last_error());
            return 1;
        }
        if (selected != 3 || ddp_cuda_comm_stream(group) != (cudaStream_t)&destroyed) {
            fprintf(stderr, "device %d and stream %p instead of this thread's\n", selected,
                    (void *)ddp_cuda_comm_stream(group));
            return 1;
        }
        ddp_group_destroy(group);
        ddp_group_destroy(control);
    }
    return destroyed != 2;
}

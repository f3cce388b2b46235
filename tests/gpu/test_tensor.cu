/*  test_tensor.cu - tensors in device memory: ddp_tensor.h gives the bits of the same calls on the CPU.

    test_tensor processes|threads [W ...]     Built with -DDDP_TEST_ON_CPU it runs on the fake GPU, as
                                              test_conformance.cu. */
#include "../support/device.h"
#include "../../ddp_tensor.h"
#include "../../examples/extras/npy.h"

typedef struct pair {
    ddp_tensor near, far;
} pair; /* the same tensor on the CPU and on the device */
#define TENSOR_TRY(call)                   \
    do {                                   \
        ddp_result tried = (call);         \
        if (tried != DDP_OK) return tried; \
    } while (0)

static size_t bytes_of(const ddp_tensor *t) { return (size_t)ddp_tensor_count(t) * ddp_dtype_size(t->dtype); }

/* Values of this rank; on the device they arrive through its compute stream, which is still busy. */
static ddp_result make(device_rank *d, pair *p, ddp_dtype dtype, int ndim, const int64_t *shape, int rank) {
    ranks_data data = {dtype, 11, 0};
    memset(p, 0, sizeof *p);
    RANKS_OK(d->cpu, ddp_tensor_create(d->cpu, &p->near, dtype, ndim, shape));
    RANKS_OK(d->cpu, ddp_tensor_create(d->group, &p->far, dtype, ndim, shape));
    ranks_fill(p->near.data, &data, rank, 0, (size_t)ddp_tensor_count(&p->near));
    return device_up(d, p->far.data, p->near.data, bytes_of(&p->near));
}

/* Compares and frees. */
static ddp_result done(device_rank *d, pair *p, const char *what) {
    size_t bytes = bytes_of(&p->near);
    unsigned char *back = (unsigned char *)malloc(bytes + 1);
    ddp_result result;
    RANKS_CHECK(d->cpu,
                back && p->near.dtype == p->far.dtype && p->near.ndim == p->far.ndim
                    && memcmp(p->near.shape, p->far.shape, sizeof p->near.shape) == 0,
                "%s: another shape", what);
    result = device_down(d, back, p->far.data, bytes);
    RANKS_CHECK(d->cpu, result == DDP_OK && (bytes == 0 || memcmp(back, p->near.data, bytes) == 0),
                "%s: other values on the device", what);
    free(back);
    ddp_tensor_free(d->cpu, &p->near);
    ddp_tensor_free(d->group, &p->far);
    return DDP_OK;
}

#define BOTH(call, in, out, ...)                                             \
    do {                                                                     \
        RANKS_OK(d->cpu, call(d->cpu, &(in).near, __VA_ARGS__ &(out).near)); \
        RANKS_OK(d->cpu, call(d->group, &(in).far, __VA_ARGS__ &(out).far)); \
    } while (0)

static ddp_result alone(device_rank *d) {
    static const int64_t shape[3] = {3, 70, 1000}, before[3] = {1, 2, 3}, padded[3] = {5, 74, 1006},
                         extent[3] = {2, 60, 900}, from[3] = {1, 3, 5};
    static const int order[3] = {2, 0, 1};
    int rank = ddp_rank(d->cpu);
    char path[64], near_text[2048], far_text[2048];
    size_t near_room = sizeof near_text, far_room = sizeof far_text;
    pair in, out, back;
    snprintf(path, sizeof path, "/tmp/ddp_test_gpu_tensor_%d_%d.npy", (int)getpid(), rank);
    TENSOR_TRY(make(d, &in, DDP_F32, 3, shape, rank));
    memset(&out, 0, sizeof out);
    BOTH(ddp_tensor_transpose, in, out, order, );
    TENSOR_TRY(done(d, &out, "transpose"));
    out.near.dtype = out.far.dtype = DDP_BF16;
    BOTH(ddp_tensor_copy, in, out, );
    TENSOR_TRY(done(d, &out, "cast"));
    RANKS_OK(d->cpu, ddp_tensor_create(d->cpu, &out.near, DDP_F32, 3, padded));
    RANKS_OK(d->cpu, ddp_tensor_create(d->group, &out.far, DDP_F32, 3, padded));
    RANKS_OK(d->cpu, ddp_tensor_fill(d->cpu, &out.near, -1.5));
    RANKS_OK(d->cpu, ddp_tensor_fill(d->group, &out.far, -1.5));
    RANKS_OK(d->cpu, ddp_tensor_copy_box(d->cpu, &in.near, NULL, &out.near, before, shape));
    RANKS_OK(d->cpu, ddp_tensor_copy_box(d->group, &in.far, NULL, &out.far, before, shape));
    RANKS_OK(d->cpu, ddp_tensor_copy_box(d->cpu, &in.near, from, &out.near, NULL, extent)); /* long runs */
    RANKS_OK(d->cpu, ddp_tensor_copy_box(d->group, &in.far, from, &out.far, NULL, extent));
    RANKS_OK(d->cpu, ddp_tensor_print(d->cpu, &out.near, DDP_REPLICATE, near_text, &near_room));
    RANKS_OK(d->cpu, ddp_tensor_print(d->group, &out.far, DDP_REPLICATE, far_text, &far_room));
    RANKS_CHECK(d->cpu, strcmp(strstr(near_text, "f32"), strstr(far_text, "f32")) == 0, "%s%s", near_text,
                far_text);
    memset(&back, 0, sizeof back);
    RANKS_OK(d->cpu, npy_save(d->group, &out.far, path));
    RANKS_OK(d->cpu, npy_load(d->cpu, path, &back.near));
    RANKS_OK(d->cpu, npy_load(d->group, path, &back.far));
    RANKS_CHECK(d->cpu,
                bytes_of(&back.near) == bytes_of(&out.near)
                    && memcmp(back.near.data, out.near.data, bytes_of(&out.near)) == 0,
                "another file");
    unlink(path);
    TENSOR_TRY(done(d, &back, ".npy"));
    TENSOR_TRY(done(d, &out, "fill and copy"));
    return done(d, &in, "a buffer that is only read");
}

static ddp_result over_ranks(device_rank *d) {
    static const int64_t shapes[][3] = {{5, 7, 1}, {12, 24, 300}};
    int rank = ddp_rank(d->cpu), w = ddp_world_size(d->cpu);
    for (int s = 0; s < 2; s++)
        for (int from = -1; from <= 2; from++)
            for (int to = -1; to <= 2; to++) {
                ddp_placement a = (ddp_placement)from, b = (ddp_placement)to;
                ddp_tensor_box box;
                pair whole, in, out, gathered;
                char what[80];
                snprintf(what, sizeof what, "tensor %d, %s to %s", s, ddp_placement_name(a),
                         ddp_placement_name(b));
                TENSOR_TRY(make(d, &whole, DDP_F32, 3, shapes[s], a == DDP_PARTIAL ? rank : 0));
                memset(&in, 0, sizeof in);
                memset(&out, 0, sizeof out);
                memset(&gathered, 0, sizeof gathered);
                if (a == DDP_PARTIAL)
                    BOTH(ddp_tensor_copy, whole, in, );
                else
                    BOTH(ddp_tensor_distribute, whole, in, w - 1, a, );
                RANKS_OK(d->cpu, ddp_placement_shard_box(b, 3, shapes[s], rank, w, &box));
                out.near.ndim = out.far.ndim = 3;
                memcpy(out.near.shape, box.shape, sizeof box.shape);
                memcpy(out.far.shape, box.shape, sizeof box.shape);
                BOTH(ddp_tensor_redistribute, in, out, a, b, );
                BOTH(ddp_tensor_gather, out, gathered, b, shapes[s], 0, );
                if (rank == 0) TENSOR_TRY(done(d, &gathered, what));
                TENSOR_TRY(done(d, &out, what));
                TENSOR_TRY(done(d, &in, what));
                TENSOR_TRY(done(d, &whole, what));
            }
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    device_rank d;
    TENSOR_TRY(device_rank_open(&d, world, 2 << 20));
    RANKS_RUN(world, alone(&d));
    RANKS_RUN(world, over_ranks(&d));
    TENSOR_TRY(device_rank_close(&d));
    return device_ok(world, user);
}

int main(int argc, char **argv) { return device_each(argc, argv, rank_main); }

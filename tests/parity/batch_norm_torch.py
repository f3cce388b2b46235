#!/usr/bin/env python3
"""examples/extras/batch_norm.h against torch.nn.BatchNorm2d: outputs, gradients and running statistics within 1e-5.

    python3 tests/parity/batch_norm_torch.py

One rank with all samples, and ranks with different numbers of samples. SyncBatchNorm needs GPUs, so the ranks are
compared with BatchNorm2d on all samples, which is what it computes. Without PyTorch it prints SKIP and exits with 77."""
import ctypes
import os
import subprocess
import sys
import tempfile

try:
    import torch
except ImportError:
    print("SKIP: PyTorch is not installed for this Python")
    sys.exit(77)

LIBRARY = r"""
#define DDP_IMPLEMENTATION
#include "ddp.h"
#include "examples/extras/batch_norm.h"
typedef struct job {
    const int64_t *first; /* of each rank: its first sample; ranks + 1 entries */
    int channels, steps;
    int64_t space;
    const float *weight, *bias, *x, *dy;
    float *y, *dx, *d_weight, *d_bias, *mean, *var, *evaluated;
} job;
static ddp_result rank_main(ddp_group *world, void *user) {
    const job *j = (const job *)user;
    int rank = ddp_rank(world);
    int64_t row = j->channels * j->space, first = j->first[rank], samples = j->first[rank + 1] - first, at = first * row;
    batch_norm_desc desc = DDP_ZERO;
    batch_norm *norm;
    float *own = (float *)calloc(2, (size_t)j->channels * sizeof *own);
    desc.channels = j->channels;
    desc.group = world;
    DDP_TRY(batch_norm_create(&norm, &desc));
    for (int s = 0; s < j->steps; s++) {
        DDP_TRY(batch_norm_forward(norm, j->weight, j->bias, j->x + at, j->y + at, samples, j->space, 1));
        DDP_TRY(batch_norm_backward(norm, j->weight, j->x + at, j->dy + at, j->dx + at, own, own + j->channels, samples, j->space));
    }
    DDP_TRY(batch_norm_forward(norm, j->weight, j->bias, j->x + at, j->evaluated + at, samples, j->space, 0));
    for (int c = 0; c < j->channels && rank == 0; c++) {
        j->d_weight[c] = own[c] * (float)ddp_world_size(world);
        j->d_bias[c] = own[j->channels + c] * (float)ddp_world_size(world);
        j->mean[c] = norm->running_mean[c];
        j->var[c] = norm->running_var[c];
    }
    free(own);
    batch_norm_destroy(norm);
    return DDP_OK;
}
int run(int ranks, job *j) {
    ddp_launch_desc desc = DDP_ZERO;
    desc.world_size = ranks;
    desc.mode = DDP_LAUNCH_THREADS;
    return ddp_launch(&desc, rank_main, j);
}
const char *problem(void) { return ddp_last_error(); }
"""
FLOATS = ["weight", "bias", "x", "dy", "y", "dx", "d_weight", "d_bias", "mean", "var", "evaluated"]


class Job(ctypes.Structure):
    _fields_ = [("first", ctypes.c_void_p), ("channels", ctypes.c_int), ("steps", ctypes.c_int), ("space", ctypes.c_int64)] + [(name, ctypes.c_void_p) for name in FLOATS]


def build(folder):
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
    source, path = os.path.join(folder, "library.c"), os.path.join(folder, "library.so")
    with open(source, "w") as file:
        file.write(LIBRARY)
    subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", "-I", root, source, "-o", path, "-lm", "-lpthread"], check=True)
    library = ctypes.CDLL(path)
    library.problem.restype = ctypes.c_char_p
    return library


def compare(library, counts, channels, side, shift):
    samples, space, steps = sum(counts), side * side, 3
    x = torch.randn(samples, channels, side, side) * 2 + shift
    dy = torch.randn_like(x)
    norm = torch.nn.BatchNorm2d(channels)
    with torch.no_grad():
        norm.weight.uniform_(-2, 2)
        norm.bias.uniform_(-1, 1)
    for _ in range(steps):
        x.requires_grad_(True)
        x.grad = norm.weight.grad = norm.bias.grad = None
        y = norm(x)
        y.backward(dy)
    x.requires_grad_(False)
    want = {"y": y, "dx": x.grad, "d_weight": norm.weight.grad, "d_bias": norm.bias.grad, "mean": norm.running_mean, "var": norm.running_var}
    want["evaluated"] = norm.eval()(x)
    have = {name: torch.zeros_like(want[name]) for name in want}
    have.update(weight=norm.weight.detach().clone(), bias=norm.bias.detach().clone(), x=x.contiguous(), dy=dy.contiguous())
    first = torch.tensor([sum(counts[:r]) for r in range(len(counts) + 1)], dtype=torch.int64)
    job = Job(first.data_ptr(), channels, steps, space, *[have[name].data_ptr() for name in FLOATS])
    if library.run(len(counts), ctypes.byref(job)):
        sys.exit(library.problem().decode())
    worst = 0
    for name in want:
        wanted = want[name].detach()
        error = ((have[name] - wanted).abs() / (1 + wanted.abs())).max().item()
        worst = max(worst, error)
        if not error <= 1e-5:
            sys.exit("%s of counts=%s channels=%d side=%d shift=%g: error %g" % (name, counts, channels, side, shift, error))
    return worst


def main():
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        library = build(folder)
        worst = 0
        for counts in ([8], [5, 3], [4, 0, 1], [1, 2, 3, 4]):
            for channels, side, shift in ((3, 5, 0), (16, 7, 10), (1, 1, -3), (8, 28, 0.5)):
                worst = max(worst, compare(library, counts, channels, side, shift))
    print("batch norm as in PyTorch on 1 to 4 ranks; the largest relative error is %.1e" % worst)


main()

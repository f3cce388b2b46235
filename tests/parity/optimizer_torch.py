#!/usr/bin/env python3
"""ddp_optimizer against torch.optim, ddp_scaler against torch.amp.GradScaler, ddp_lr_at against torch.optim.lr_scheduler.

    python3 tests/parity/optimizer_torch.py

AdamW and SGD agree within rounding, the loss scaler bit for bit. Without PyTorch 2.6 or newer it prints SKIP and exits with 77."""
import ctypes
import math
import os
import subprocess
import sys
import tempfile

try:
    import torch
except ImportError:
    print("SKIP: PyTorch is not installed for this Python")
    sys.exit(77)
if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 6):
    print("SKIP: PyTorch 2.6 or newer is needed, this is " + torch.__version__)
    sys.exit(77)

LIBRARY = r"""
#define DDP_IMPLEMENTATION
#include "ddp_fsdp.h"
static ddp_group *group;
static ddp_optimizer *optimizer;
static ddp_scaler scaler;
static ddp_param param;
static ddp_result open_group(void) {
    ddp_group_desc desc = DDP_ZERO;
    desc.init_method = "self://";
    return group ? DDP_OK : ddp_group_create(&group, &desc);
}
/* o: beta1 beta2 eps momentum dampening nesterov weight_decay */
int start(int kind, int dtype, int64_t count, const float *o, void *w, void *g) {
    ddp_optimizer_desc d = DDP_ZERO;
    ddp_optimizer_destroy(optimizer);
    d.kind = (ddp_optimizer_kind)kind;
    d.beta1 = o[0]; d.beta2 = o[1]; d.eps = o[2]; d.momentum = o[3]; d.dampening = o[4]; d.nesterov = (int)o[5]; d.weight_decay = o[6];
    param.value.data = w;
    param.value.dtype = (ddp_dtype)dtype;
    param.value.ndim = 1;
    param.value.shape[0] = count;
    param.grad.data = g;
    d.params = &param;
    d.param_count = 1;
    return open_group() != DDP_OK ? -1 : ddp_optimizer_create(&optimizer, group, &d);
}
int step(float lr) { return ddp_optimizer_step(optimizer, lr); }
int scaler_start(float init, float growth, float backoff, int interval) {
    ddp_scaler_desc d = DDP_ZERO;
    d.init_scale = init; d.growth_factor = growth; d.backoff_factor = backoff; d.growth_interval = interval;
    return open_group() != DDP_OK ? -1 : ddp_scaler_init(&scaler, &d);
}
int scaler_step(float *g, int64_t count, float *scale) { /* found_inf, or an error; *scale: after the update */
    ddp_tensor tensor = DDP_ZERO;
    int found;
    tensor.data = g;
    tensor.dtype = DDP_F32;
    tensor.ndim = 1;
    tensor.shape[0] = count;
    if (ddp_scaler_unscale(&scaler, group, &tensor, 1) != DDP_OK) return -1;
    found = ddp_scaler_found_inf(&scaler);
    if (ddp_scaler_update(&scaler) != DDP_OK) return -1;
    *scale = ddp_scaler_scale(&scaler);
    return found;
}
float rate(int kind, double peak, double floor_, int64_t warmup, int64_t total, float power, int64_t at) {
    ddp_lr_desc d = DDP_ZERO;
    d.kind = (ddp_lr_kind)kind; d.max_lr = peak; d.min_lr = floor_; d.warmup_steps = warmup; d.total_steps = total; d.power = power;
    return ddp_lr_at(&d, at);
}
const char *problem(void) { return ddp_last_error(); }
"""


def build(folder):
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
    source, path = os.path.join(folder, "library.c"), os.path.join(folder, "library.so")
    with open(source, "w") as file:
        file.write(LIBRARY)
    subprocess.check_call([os.environ.get("CC", "cc"), "-std=gnu11", "-O1", "-fPIC", "-shared", "-I", root, source, "-o", path, "-lm", "-lpthread"])
    library = ctypes.CDLL(path)
    library.step.argtypes = [ctypes.c_float]
    library.scaler_start.argtypes = [ctypes.c_float] * 3 + [ctypes.c_int]
    library.rate.argtypes = [ctypes.c_int, ctypes.c_double, ctypes.c_double, ctypes.c_int64, ctypes.c_int64, ctypes.c_float, ctypes.c_int64]
    library.rate.restype = ctypes.c_float
    library.problem.restype = ctypes.c_char_p
    return library


def f32(x):
    return float(torch.tensor(x, dtype=torch.float32))


def check(good, text):
    if not good:
        print(text)
        sys.exit(1)


def optimizer(library, name, dtype, **options):
    count, generator = 1003, torch.Generator().manual_seed(1)
    options = {key: value if isinstance(value, bool) else f32(value) for key, value in options.items()}
    theirs = torch.nn.Parameter(torch.randn(count, generator=generator, dtype=dtype))
    ours, grad = theirs.detach().clone(), torch.empty(count, dtype=dtype)
    values = [options.get(key, 0.0) for key in ("beta1", "beta2", "eps", "momentum", "dampening", "nesterov", "weight_decay")]
    if name == "AdamW":
        peer = torch.optim.AdamW([theirs], lr=1, betas=tuple(values[:2]), eps=values[2], weight_decay=values[6])
    else:
        peer = torch.optim.SGD([theirs], lr=1, **options)
    result = library.start(0 if name == "AdamW" else 1, 1 if dtype == torch.float32 else 2, ctypes.c_int64(count), (ctypes.c_float * 7)(*values),
                           ctypes.c_void_p(ours.data_ptr()), ctypes.c_void_p(grad.data_ptr()))
    check(result == 0, library.problem())
    for step in range(1, 11):
        lr = f32(0.01 / step)
        theirs.grad = torch.randn(count, generator=generator, dtype=dtype)
        grad.copy_(theirs.grad)
        peer.param_groups[0]["lr"] = lr
        peer.step()
        check(library.step(lr) == 0, library.problem())
        error = float(((ours - theirs.detach()).abs() / (1 + theirs.detach().abs())).max())
        check(error <= (3e-7 * step if dtype == torch.float32 else 1e-15 * step), "%s %s %s: off by %g in step %d" % (name, dtype, options, error, step))


def scaler(library, init, growth, backoff, interval, share):
    generator = torch.Generator().manual_seed(2)
    weight = torch.nn.Parameter(torch.zeros(37))
    peer, sgd = torch.amp.GradScaler("cpu", init, growth, backoff, interval), torch.optim.SGD([weight], lr=0.1)
    scale = ctypes.c_float(init)
    check(library.scaler_start(init, growth, backoff, interval) == 0, library.problem())
    for step in range(300):
        peer.scale(torch.zeros(1))  # makes its tensors
        weight.grad = torch.randn(37, generator=generator) * peer.get_scale()
        if float(torch.rand(1, generator=generator)) < share:
            weight.grad[step % 37] = math.nan if step % 2 else -math.inf
        bad = not bool(weight.grad.isfinite().all())
        ours = weight.grad.clone()
        peer.unscale_(sgd)
        peer.step(sgd)
        peer.update()
        found = library.scaler_step(ctypes.c_void_p(ours.data_ptr()), ctypes.c_int64(37), ctypes.byref(scale))
        check(found == bad and scale.value == peer.get_scale(), "step %d: found_inf=%d of %d, scale %g of %g" % (step, found, bad, scale.value, peer.get_scale()))
        check(bad or torch.equal(ours, weight.grad), "step %d: gradients differ" % step)


def schedules(library):
    """PyTorch counts steps from 0 and has a floor only in the cosine: no warm-up here, so its step s is step s of ddp."""
    weight, total = torch.nn.Parameter(torch.zeros(1)), 40
    rules = torch.optim.lr_scheduler
    cases = ((1, 0.01, 0, lambda o: rules.CosineAnnealingLR(o, total, eta_min=0.01)), (2, 0.02, 0, lambda o: rules.LinearLR(o, 1.0, 0.2, total)),
             (3, 0.0, 3, lambda o: rules.PolynomialLR(o, total, power=3.0)))
    for kind, floor, power, make in cases:
        sgd = torch.optim.SGD([weight], lr=0.1)
        peer = make(sgd)
        for step in range(total):
            theirs, ours = sgd.param_groups[0]["lr"], library.rate(kind, 0.1, floor, 0, total, power, step)
            check(abs(ours - theirs) < 1e-7 * 0.1, "schedule %d step %d: %.9g, PyTorch %.9g" % (kind, step, ours, theirs))
            sgd.step()
            peer.step()


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        library = build(folder)
        for dtype in (torch.float32, torch.float64):
            optimizer(library, "AdamW", dtype, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
            optimizer(library, "AdamW", dtype, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.1)
            optimizer(library, "SGD", dtype)
            optimizer(library, "SGD", dtype, weight_decay=0.1)
            optimizer(library, "SGD", dtype, momentum=0.9)
            optimizer(library, "SGD", dtype, momentum=0.9, dampening=0.3, weight_decay=0.1)
            optimizer(library, "SGD", dtype, momentum=0.8, nesterov=True, weight_decay=0.01)
        scaler(library, 65536.0, 2.0, 0.5, 2000, 0.1)
        scaler(library, 1024.0, 2.0, 0.5, 3, 0.15)
        scaler(library, 2.0**125, 2.0, 0.25, 2, 0.02)
        schedules(library)
    print("AdamW, SGD, the loss scaler and schedules agree with PyTorch %s" % torch.__version__)
    return 0


sys.exit(main())

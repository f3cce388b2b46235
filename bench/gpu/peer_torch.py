#!/usr/bin/env python3
"""PyTorch's time for the steps that ddp_cuda.cuh fuses, on the same GPU: a copy, fused AdamW, the norm of
many tensors by foreach. And the rate of a large bf16 product: the limit of a kernel that is bound by FLOPs.

    peer_torch.py RESULTS.jsonl     reads the device line and the kernels of bench_gpu, prints a table,
                                    appends its lines

Each line is written as soon as it is measured. Status 77 without PyTorch or a device. Figures as in
bench_gpu.cu: medians of 9 blocks of at least 4 ms, by events."""
import json
import statistics
import sys

try:
    import torch
except ImportError:
    print("PyTorch is not installed: left out")
    sys.exit(77)
if not torch.cuda.is_available():
    print("PyTorch sees no GPU: left out")
    sys.exit(77)

COUNT, TENSORS, PRODUCT = 64 << 20, 64, 8192


def seconds_of(call):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        call()
    calls, values = 1, []
    while len(values) < 9:
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        seconds = begin.elapsed_time(end) * 1e-3
        if not values and seconds < 4e-3 and calls < 1 << 16:
            calls *= 2
            continue
        values.append(seconds / calls)
    return statistics.median(values)


def write(out, line):
    out.write(json.dumps({"kind": "torch", "version": torch.__version__, **line}) + "\n")
    out.flush()


def report(out, kernels, name, seconds, size, kernel):
    """One measurement: a line of the table and one of the file. kernel: bench_gpu's kernel for the same
    step."""
    rate = size / seconds
    ratio = kernels[kernel]["bytes"] / kernels[kernel]["seconds"] / rate if kernel in kernels else float("nan")
    print(f"{name:46} {seconds * 1e3:9.3f} ms {rate * 1e-9:8.0f} GB/s   {ratio:.2f} times as fast ({kernel})", flush=True)
    write(out, {"name": name, "bytes": size, "seconds": seconds, "ddp_speedup": ratio})


def measure_copy(out, kernels):
    source, target = (torch.rand(COUNT, device="cuda") for _ in range(2))
    seconds = seconds_of(lambda: target.copy_(source))
    report(out, kernels, "copy_ on the device", seconds, COUNT * 8, "cudaMemcpyAsync on the device")


def measure_steps(out, kernels):
    for dtype, label in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
        params = [torch.zeros(COUNT // TENSORS // 1024, 1024, dtype=dtype, device="cuda") for _ in range(TENSORS)]
        for p in params:
            p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in params]
        norm = seconds_of(lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        size = COUNT * params[0].element_size()
        report(out, kernels, f"foreach norm, {label}", norm, size, f"sum_squares {label}, rows of 1024")
        if dtype is torch.float32:
            optimizer = torch.optim.AdamW(params, lr=1e-6, fused=True)
            seconds = seconds_of(optimizer.step)
            report(out, kernels, "fused AdamW, f32", seconds, COUNT * 28, "ddp_cuda_adamw, f32 gradient")
        del params, gradients


def measure_product(out):
    a, b = (torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    seconds = seconds_of(lambda: a @ b)
    tera = 2 * PRODUCT**3 / seconds * 1e-12
    print(f"{'bf16 product of 8192, random values':46} {seconds * 1e3:9.3f} ms {tera:8.0f} TFLOP/s", flush=True)
    write(out, {"name": "bf16 product", "seconds": seconds, "tflops": tera})


def main():
    path = sys.argv[1]
    with open(path) as lines:
        kernels = {line["name"]: line for line in map(json.loads, lines) if line["kind"] == "kernel"}
    title = f"PyTorch {torch.__version__}, the same run"
    print(f"\n{title:46} {'time':>12} {'read+written':>13}   ddp per byte", flush=True)
    with open(path, "a") as out:
        measure_copy(out, kernels)
        measure_steps(out, kernels)
        measure_product(out)


main()

#!/usr/bin/env python3
"""What PyTorch takes for the steps that ddp_cuda.cuh fuses, on the same GPU: fused AdamW and the norm of many tensors by foreach.

    peer_torch.py RESULTS.jsonl     reads the device line and the kernels of bench_gpu, prints a table, appends its own lines

Status 77 without PyTorch or a device. Figures as in bench_gpu.cu: medians of 9 blocks of at least 4 ms, by events."""
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

COUNT, TENSORS = 64 << 20, 64


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


def main():
    path = sys.argv[1]
    with open(path) as lines:
        ours = {line["name"]: line for line in map(json.loads, lines) if line["kind"] == "kernel"}
    results = []
    for dtype, label in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
        params = [torch.zeros(COUNT // TENSORS // 1024, 1024, dtype=dtype, device="cuda") for _ in range(TENSORS)]
        for p in params:
            p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in params]
        norm = seconds_of(lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        results.append((f"foreach norm, {label}", norm, COUNT * p.element_size(), f"sum_squares {label}, rows of 1024"))
        if dtype is torch.float32:
            optimizer = torch.optim.AdamW(params, lr=1e-6, fused=True)
            results.append(("fused AdamW, f32", seconds_of(optimizer.step), COUNT * 28, "ddp_cuda_adamw, f32 gradient"))
        del params, gradients
    print(f"\n{'PyTorch ' + torch.__version__ + ', the same run':46} {'time':>12} {'read+written':>13}   ddp per byte")
    with open(path, "a") as out:
        for name, seconds, size, mine in results:
            rate = size / seconds
            ratio = ours[mine]["bytes"] / ours[mine]["seconds"] / rate if mine in ours else float("nan")
            print(f"{name:46} {seconds * 1e3:9.3f} ms {rate * 1e-9:8.0f} GB/s   {ratio:.2f} times as fast ({mine})")
            line = {"kind": "torch", "name": name, "version": torch.__version__, "bytes": size, "seconds": seconds, "ddp_speedup": ratio}
            out.write(json.dumps(line) + "\n")


main()

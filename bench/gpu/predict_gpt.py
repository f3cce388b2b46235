#!/usr/bin/env python3
"""predict_gpt.py - the least work and traffic of a step of examples/gpt/train_gpt_cuda.cu, by groups of kernels.

    predict_gpt.py [--size 124M|1.5B] [--batch 32] [--length 1024] [--recompute] [--tflops 989] [--tbytes 4.8]
                   [--json]

Needs no GPU, and no GPU can be faster. The floor of a row is the longer of its FLOPs at --tflops and its
bytes at --tbytes, as if the other were free, nothing were read twice, and nothing waited. The defaults are
datasheet values of an H200 (dense bf16, HBM3e), not measurements: large products reach about 80% of the one,
copies about 90% of the other. The counts are those that gpt_cuda.cuh passes to its note hook; `bench_gpt
--notes` prints these on a GPU."""
import argparse
import json

SIZES = {"124M": (50257, 12, 12, 768), "1.5B": (50257, 48, 25, 1600)}  # vocabulary, layers, heads, channels
E = 2  # bytes of a bf16


def product(m, n, k, extra=0):
    """FLOPs and bytes of an (m, k) by (k, n) product, bf16; extra: matrices of (m, n) that its epilogue reads
    or writes."""
    return 2.0 * m * n * k, E * (m * k + k * n + m * n * (1 + extra))


def rows_of(size, batch, length, recompute):
    """(group, launches, FLOPs, bytes) in the order of a step."""
    V, L, H, C = SIZES[size]
    N, T = batch * length, length
    padded = (V + 63) // 64 * 64
    parameters = V * C + T * C + L * (12 * C * C + 13 * C) + 2 * C
    runs = 2 * L - 1 if recompute else L  # forwards of blocks: the activations of the last one are still valid
    flops_of = lambda *products: sum(p[0] for p in products)
    bytes_of = lambda *products: sum(p[1] for p in products)
    qkv, proj, up, down = product(N, 3 * C, C), product(N, C, C), product(N, 4 * C, C, 1), product(N, C, 4 * C, 1)
    inputs = product(N, C, 3 * C), product(N, C, C), product(N, C, 4 * C), product(N, 4 * C, C, 1)
    weights = product(3 * C, C, N), product(C, C, N), product(4 * C, C, N), product(C, 4 * C, N)
    again = qkv, proj, up  # recompute leaves out the last product of a block
    causal = N * (T + 1) / 2.0 * C * 2  # one of attention's products: half of the scores
    lse = 4.0 * N * H
    rows = [
        ("embedding", 1, 0, 2 * N * C * E),
        ("block: layer norms with residual", 2 * runs, 0, runs * (2 + 4) * N * C * E),
        ("block: products, forward", 3 * runs + L, runs * flops_of(*again) + L * down[0], runs * bytes_of(*again) + L * down[1]),
        ("block: attention, forward", runs, 2 * causal * runs, runs * (4 * N * C * E + lse)),
        ("head: layer norm", 1, 0, 2 * N * C * E),
        ("head: logits", 1, *product(N, V, C)),
        ("head: classifier, in place", 1, 0, 2.0 * N * padded * E),
        ("head: products, backward", 2, *map(sum, zip(product(V, C, N), product(N, C, V)))),
        ("head: layer norm, backward", 2, 0, 3 * N * C * E),
        ("block: products of weight gradients", 4 * L, L * flops_of(*weights), L * bytes_of(*weights)),
        ("block: products of input gradients", 4 * L, L * flops_of(*inputs), L * bytes_of(*inputs)),
        ("block: attention, backward", 2 * L, 5 * causal * L, L * (8 * N * C * E + lse)),
        ("block: layer norms, backward", 4 * L, 0, L * 2 * 4 * N * C * E),
        ("embedding, backward", 3, 0, V * C * E + 3 * N * C * E),
        ("gradients to f32, and of wte together", L + 3, 0, (parameters + V * C) * (E + 4) + V * C * 4 * 3.0),
        ("norm of the gradients", L + 2, 0, parameters * 4.0),
        ("AdamW", L + 2, 0, parameters * (4.0 + 24 + E)),
    ]
    model_flops = 6.0 * N * (L * 12 * C * C + V * C + L * T * C)
    return rows, parameters, model_flops


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="124M")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--tflops", type=float, default=989)
    parser.add_argument("--tbytes", type=float, default=4.8)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows, parameters, model_flops = rows_of(args.size, args.batch, args.length, args.recompute)
    floors = [max(flops / args.tflops, moved / args.tbytes) * 1e-9 for _, _, flops, moved in rows]
    total, tokens = sum(floors), args.batch * args.length
    if args.json:
        print(json.dumps({"rows": [{"group": r[0], "launches": r[1], "flops": r[2], "bytes": r[3], "floor_ms": ms} for r, ms in zip(rows, floors)],
                          "parameters": parameters, "model_flops": model_flops, "floor_ms": total}))
        return
    print("| kernels | launches | TFLOP | GB | limit | floor, ms | share of the floor |")
    print("|---|---|---|---|---|---|---|")
    for (group, launches, flops, moved), ms in zip(rows, floors):
        limit = "FLOPs" if flops / args.tflops > moved / args.tbytes else "bytes"
        tera = "%.3f" % (flops * 1e-12) if flops else ""
        print("| %s | %d | %s | %.2f | %s | %.2f | %.1f%% |" % (group, launches, tera, moved * 1e-9, limit, ms, 100 * ms / total))
    print("| **all** | %d | %.3f | %.2f | | **%.2f** | |" % (sum(r[1] for r in rows), sum(r[2] for r in rows) * 1e-12, sum(r[3] for r in rows) * 1e-9, total))
    print("\n%d parameters, %.3f TFLOP of the model per step (6 per token and matrix element, 6 T C per token and block). At the floor: %.0f tokens/s, "
          "MFU %.1f%%." % (parameters, model_flops * 1e-12, tokens / total * 1e3, 100 * model_flops / (total * 1e-3 * args.tflops * 1e12)))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""peer_gpt_torch.py - GPT-2 in the fastest form of PyTorch, the peer of examples/gpt/train_gpt_cuda.cu.

    peer_gpt_torch.py SHARD.bin [--size 124M|1.5B] [--batch 32] [--length 1024] [--precision autocast|bf16]
                      [--recompute] [--compile whole|blocks|none]
    peer_gpt_torch.py --count [--size 1.5B]     only parameters and FLOPs; needs no GPU

Reads lines "steps N" from stdin and answers each with a line of JSON: the milliseconds of N steps, by events
on the device, and the last loss. The program stays alive between its turns, so the model is compiled once.
Between turns it leaves the GPU idle. Ends with its input.

A step is that of nanoGPT (Karpathy). A batch of random windows of the shard arrives by an asynchronous copy
from pinned memory during the previous step. Then forward, backward, gradient norm clipped to 1, fused AdamW
(decay 0.1 on matrices). torch.compile; scaled_dot_product_attention by cuDNN or by flash attention, whichever
is faster at this shape; matrix products in bf16. Nothing waits for the device inside a step. The vocabulary
of 50257 is padded to 50304, as in nanoGPT.

    --precision autocast   weights, gradients and moments in f32, products and activations in bf16: weights as
                           precise as those of ddp
    --precision bf16       weights, gradients and moments in bf16: fewer bytes than ddp, and less precise,
                           without f32 master weights

Status 77 without PyTorch or a device (--device cpu tries the script)."""
import argparse
import json
import mmap
import sys
import time

try:
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint
except ImportError:
    print("PyTorch is not installed: left out", file=sys.stderr)
    sys.exit(77)

SIZES = {"tiny": (256, 2, 2, 32), "124M": (50304, 12, 12, 768), "1.5B": (50304, 48, 25, 1600)}  # vocabulary, layers, heads, channels
HEADER_BYTES = 1024


class Block(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.fc, self.mlp_proj = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.proj(y)
        return x + self.mlp_proj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocab, context, layers, heads, channels, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.wte, self.wpe = nn.Embedding(vocab, channels), nn.Embedding(context, channels)
        self.blocks = nn.ModuleList([Block(channels, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, vocab, bias=False)
        self.head.weight = self.wte.weight
        for name, p in self.named_parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if name.endswith("proj.weight") else 0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.reshape(-1))


def flops_of(vocab, layers, channels, length, tokens):
    """Forward and backward, as gpt_cuda_flops counts: 6 per element of a matrix and token, 6 T C per token
    and block for causal attention."""
    return 6.0 * tokens * (layers * 12 * channels * channels + vocab * channels + layers * length * channels)


class Windows:
    """Batches of random windows of a shard, each copied to the device while the step before it runs."""

    def __init__(self, path, batch, length, device, vocab):
        with open(path, "rb") as file:
            self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.tokens = torch.frombuffer(self.memory, dtype=torch.int16, offset=HEADER_BYTES)
        self.random = torch.Generator().manual_seed(1)
        self.batch, self.length, self.device = batch, length, device
        self.vocab = vocab if vocab < 50257 else 0  # small test models: tokens modulo their vocabulary
        self.host = [torch.empty((2, batch, length), dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(4)]
        self.copied = [torch.cuda.Event() if device.type == "cuda" else None for _ in range(4)]
        self.turn = 0
        self.ahead = self.fetch()

    def fetch(self):
        self.turn = (self.turn + 1) % len(self.host)
        host, copied = self.host[self.turn], self.copied[self.turn]
        if copied:
            copied.synchronize()  # of four steps ago: has finished
        starts = torch.randint(len(self.tokens) - self.length - 1, (self.batch,), generator=self.random).tolist()
        rows = torch.stack([self.tokens[start : start + self.length + 1] for start in starts]).to(torch.int64) & 0xFFFF
        if self.vocab:
            rows %= self.vocab
        host[0], host[1] = rows[:, :-1], rows[:, 1:]
        there = host.to(self.device, non_blocking=True)
        if copied:
            copied.record()
        return there

    def next(self):
        now, self.ahead = self.ahead, None
        return now[0], now[1]

    def prefetch(self):
        self.ahead = self.fetch()


def milliseconds_of_attention(shape):
    batch, heads, length, size = shape
    lies = (batch, length, heads, size)  # the layout that the product before it writes
    q, k, v = (torch.randn(lies, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3))
    gradient, events = torch.randn(lies, device="cuda", dtype=torch.bfloat16).transpose(1, 2), []
    for _ in range(12):
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in zip(events[2:], events[3:]))[4]


def choose_attention(shape):
    """Enables only the faster one of cuDNN's and the flash kernel."""
    took = {}
    for name in ("cudnn", "flash"):
        use_attention(name)
        try:
            took[name] = milliseconds_of_attention(shape)
        except RuntimeError:  # not for this shape or device
            continue
    if not took:
        sys.exit("peer_gpt_torch: neither cuDNN's nor flash attention takes heads of %d here" % shape[-1])
    use_attention(min(took, key=took.get))
    return {name: round(ms, 3) for name, ms in took.items()}


def use_attention(name):
    torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
    torch.backends.cuda.enable_flash_sdp(name == "flash")
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)


class Trainer:
    def __init__(self, args, device):
        vocab, layers, heads, channels = SIZES[args.size]
        self.device = device
        self.autocast = args.precision == "autocast"
        torch.manual_seed(1)
        with torch.device(device):
            self.model = GPT(vocab, args.length, layers, heads, channels, args.recompute)
        if not self.autocast:
            self.model.bfloat16()
        params = list(self.model.parameters())
        groups = [{"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1}, {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]
        self.params = params
        self.optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=device.type == "cuda")
        self.run = self.model
        if args.compile == "whole":
            self.run = torch.compile(self.model)
        elif args.compile == "blocks":  # compile one block for all layers: many layers would take minutes
            for block in self.model.blocks:
                block.compile()
        self.windows = Windows(args.shard, args.batch, args.length, device, vocab)

    def step(self):
        tokens, targets = self.windows.next()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            loss = self.run(tokens, targets)
        self.windows.prefetch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def steps(self, count):
        """Milliseconds of each step, and the last loss."""
        if self.device.type != "cuda":
            times = [time.perf_counter()]
            for _ in range(count):
                loss = self.step()
                times.append(time.perf_counter())
            return [(b - a) * 1e3 for a, b in zip(times, times[1:])], loss.item()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            loss = self.step()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(events, events[1:])], loss.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("shard", nargs="?")
    parser.add_argument("--size", choices=SIZES, default="124M")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--precision", choices=("autocast", "bf16"), default="autocast")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--compile", choices=("whole", "blocks", "none"), default="whole")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--count", action="store_true")
    args = parser.parse_args()
    vocab, layers, heads, channels = SIZES[args.size]
    if args.count:
        with torch.device("meta"):
            model = GPT(vocab, args.length, layers, heads, channels)
        print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()),
                          "flops": flops_of(vocab, layers, channels, args.length, args.batch * args.length)}))
        return
    if not args.shard:
        parser.error("give a token shard, as examples/gpt/llmc.c writes them")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("PyTorch sees no GPU: left out", file=sys.stderr)
        sys.exit(77)
    device, attention = torch.device(args.device), {}
    if device.type == "cuda":
        attention = choose_attention((args.batch, heads, args.length, channels // heads))
        torch.set_float32_matmul_precision("high")
    trainer = Trainer(args, device)
    about = {"torch": torch.__version__, "size": args.size, "batch": args.batch, "length": args.length, "precision": args.precision,
             "recompute": args.recompute, "compile": args.compile, "attention_ms": attention, "parameters": sum(p.numel() for p in trainer.params),
             "flops": flops_of(vocab, layers, channels, args.length, args.batch * args.length)}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        word, count = line.split()
        if word != "steps":
            sys.exit("peer_gpt_torch: %r is no command; give lines \"steps N\"" % line)
        times, loss = trainer.steps(int(count))
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        print(json.dumps({"ms": [round(t, 4) for t in times], "loss": round(loss, 4), "peak_bytes": peak}), flush=True)


if __name__ == "__main__":
    main()

"""peer_gpt_torch.py - the small GPT of examples/gpt/gpt.h in PyTorch.

    pip install torch
    python bench/peer_gpt_torch.py [--vocab 256] [--context 256] [--batch 4] [--layers 4] [--heads 4]
    [--channels 256]

Eager mode, f32, one thread: forward, backward and an AdamW step. Prints the median tokens per second.
bench/bench_gpt.c runs the same shape with examples/gpt/gpt.h. Only this script needs PyTorch, no test does."""
import argparse
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.attn_proj = nn.Linear(channels, channels)
        self.ln2 = nn.LayerNorm(channels)
        self.fc = nn.Linear(channels, 4 * channels)
        self.mlp_proj = nn.Linear(4 * channels, channels)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.attn_proj(y)
        return x + self.mlp_proj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocab, context, layers, heads, channels):
        super().__init__()
        self.wte = nn.Embedding(vocab, channels)
        self.wpe = nn.Embedding(context, channels)
        self.blocks = nn.ModuleList([Block(channels, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, vocab, bias=False)
        self.head.weight = self.wte.weight
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def main():
    parser = argparse.ArgumentParser()
    shape = (("vocab", 256), ("context", 256), ("batch", 4), ("layers", 4), ("heads", 4), ("channels", 256), ("steps", 30))
    for name, default in shape:
        parser.add_argument("--" + name, type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = GPT(args.vocab, args.context, args.layers, args.heads, args.channels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, foreach=True)
    text = torch.randint(args.vocab, (args.batch, args.context + 1))
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    times = []
    for step in range(args.steps + 3):
        start = time.perf_counter()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= 3:
            times.append(time.perf_counter() - start)
    median = statistics.median(times)
    print(f"torch {torch.__version__}: vocab {args.vocab}, loss {loss.item():.4f}, {median * 1e3:.1f} ms per step, "
          f"{args.batch * args.context / median:.0f} tokens/s")


if __name__ == "__main__":
    main()

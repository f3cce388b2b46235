"""peer_scaling_torch.py - the models of train_mlp.c and train_gpt.c under PyTorch's DistributedDataParallel over Gloo.

    pip install torch
    python bench/peer_scaling_torch.py mlp|gpt [--ranks 2] [--batch 256] [--count 12]

--batch is the global batch. One thread per rank, each rank on one core, f32, AdamW, eager mode. The data are in
memory, without a DataLoader. A rank computes its share of a batch at once, without micro-batches.
mlp: --count epochs of 4096 images with a test on 1024, as in train_mlp.c; prints images/s of the median epoch, without
the first. gpt: 4 layers, 256 channels, context 256; prints tokens/s over --count steps after one that is not timed.
bench/scaling.sh calls it. Only this script needs PyTorch, no test does."""
import argparse
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from peer_gpt_torch import GPT
from torch.nn.parallel import DistributedDataParallel

TRAIN, TEST, PIXELS, CLASSES = 4096, 1024, 784, 10
VOCAB, CONTEXT, LAYERS, HEADS, CHANNELS = 256, 256, 4, 4, 256


def mean_over_ranks(value):
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def make_images():
    """Noise, and a bright stripe at the height of the label."""
    labels = torch.arange(TRAIN + TEST) % CLASSES
    stripe = (torch.arange(PIXELS) // 56)[None, :] == labels[:, None] + 2
    noise = torch.randint(128, (TRAIN + TEST, PIXELS), generator=torch.Generator().manual_seed(1))
    return (noise + 60 * stripe).to(torch.uint8), labels


def train_mlp(rank, arguments):
    images, labels = make_images()
    pixels = lambda index: images[index].float() / 128 - 0.5
    width = (PIXELS, 128, 128, 128, CLASSES)
    layers = [layer for i in range(4) for layer in (nn.Linear(width[i], width[i + 1]), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers[:-1]), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, foreach=True)
    share, tested = arguments.batch // arguments.ranks, TEST // arguments.ranks
    times = []
    for epoch in range(arguments.count):
        begin = time.perf_counter()
        order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(())
        for start in range(rank * share, TRAIN, arguments.batch):
            index = order[start : start + share]
            optimizer.zero_grad(set_to_none=False)
            loss = F.cross_entropy(model(pixels(index)), labels[index])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        with torch.no_grad():
            index = torch.arange(TRAIN + rank * tested, TRAIN + (rank + 1) * tested)
            right = (model.module(pixels(index)).argmax(1) == labels[index]).float().mean()
        mean_over_ranks(total)
        accuracy = mean_over_ranks(right)
        times.append(time.perf_counter() - begin)
    if accuracy < 0.8:
        raise SystemExit(f"peer_scaling_torch: test accuracy {accuracy:.2f} is below 0.8")
    return "images/s", TRAIN / statistics.median(times[1:])


def train_gpt(rank, arguments):
    model = DistributedDataParallel(GPT(VOCAB, CONTEXT, LAYERS, HEADS, CHANNELS), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, foreach=True)
    share = arguments.batch // arguments.ranks
    text = torch.randint(VOCAB, (1 << 20,), generator=torch.Generator().manual_seed(2))
    starts = torch.Generator().manual_seed(3 + rank)
    for step in range(-1, arguments.count):
        if step == 0:
            begin = time.perf_counter()
        first = torch.randint(len(text) - CONTEXT - 1, (share,), generator=starts)
        rows = text[first[:, None] + torch.arange(CONTEXT + 1)]
        optimizer.zero_grad(set_to_none=False)
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        mean_over_ranks(loss.detach())
    seconds = time.perf_counter() - begin
    return "tokens/s", arguments.count * arguments.batch * CONTEXT / seconds


def run(rank, arguments, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo", rank=rank, world_size=arguments.ranks)
    unit, speed = (train_mlp if arguments.model == "mlp" else train_gpt)(rank, arguments)
    if rank == 0:
        print(f"{unit} {speed:.1f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=("mlp", "gpt"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--count", type=int, default=12)
    arguments = parser.parse_args()
    if arguments.batch % arguments.ranks or TEST % arguments.ranks or arguments.count < 2:
        parser.error("--ranks must divide --batch and 1024; --count: 2 or more")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(run, args=(arguments, port), nprocs=arguments.ranks, start_method="fork")


if __name__ == "__main__":
    main()

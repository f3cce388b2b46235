"""peer_ddp_torch.py - the MLP of bench_ddp_mlp.c under PyTorch's DistributedDataParallel over Gloo.

    pip install torch
    python bench/peer_ddp_torch.py [--ranks 2] [--rounds 11] [--batch 64]

Layers 1024-2048-2048-10, ReLU, squared error, f32, SGD, one thread and one core per rank. Rounds of 5 steps
alternate between the bare model and the wrapped one. The time of a round is that of its slowest rank; figures
are medians. Only this script needs PyTorch, no test does."""
import argparse
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

BLOCK = 5


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def run(rank, arguments, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=arguments.ranks)
    models = [make_model(), DistributedDataParallel(make_model(), gradient_as_bucket_view=True)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.001) for model in models]
    x, target = torch.randn(arguments.batch, 1024), torch.randn(arguments.batch, 10)
    times = [[], []]
    for round_number in range(-1, arguments.rounds):
        for kind in range(2):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(BLOCK):
                optimizers[kind].zero_grad(set_to_none=kind == 0)
                nn.functional.mse_loss(models[kind](x), target).backward()
                optimizers[kind].step()
            slowest = torch.tensor([(time.perf_counter() - begin) / BLOCK])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if round_number >= 0:
                times[kind].append(slowest.item())
    if rank == 0:
        plain, wrapped = (statistics.median(t) for t in times)
        size = sum(p.numel() * 4 for p in models[0].parameters()) / 2**20
        print(f"PyTorch {torch.__version__}, {arguments.ranks} ranks, batch {arguments.batch} each, {size:.1f} MiB of gradients")
        print(f"  plain {plain * 1e3:.2f} ms per step, with DDP over Gloo {wrapped * 1e3:.2f} ms")
        print(f"  communication {100 * (wrapped - plain) / wrapped:.1f}% of a step")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run, args=(arguments, port), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()

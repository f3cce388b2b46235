"""peer_loader_torch.py - the measurements of bench_loader.c with PyTorch's DataLoader.

    pip install torch
    python bench/peer_loader_torch.py [seconds per row, default 1]

Samples of 784 bytes and a label from one tensor in memory. DataLoader's workers are processes. In the first
table consumer and worker share one core, and the rate is per second of processor time of both. Only this
script needs PyTorch, no test does."""
import os
import statistics
import sys
import time
import warnings

import torch
from torch.utils.data import DataLoader, Dataset

SAMPLES, FIRST, STEPS, BATCH = 60000, 20, 60, 8


class Images(Dataset):
    def __init__(self):
        self.images = torch.full((SAMPLES, 28, 28), 7, dtype=torch.uint8)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.images[index], index % 10


class Slow(Dataset):
    def __init__(self, fetch_s):
        self.fetch_s = fetch_s

    def __len__(self):
        return (FIRST + STEPS) * BATCH

    def __getitem__(self, index):
        time.sleep(self.fetch_s)
        return index % 256


def processor_s(batches):
    """Processor time of this process and the workers, from /proc in hundredths of a second."""
    total = time.process_time()
    for worker in getattr(batches, "_workers", []):
        with open("/proc/%d/stat" % worker.pid) as file:
            fields = file.read().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def small_samples(workers, batch, seconds):
    loader = DataLoader(Images(), batch, shuffle=True, num_workers=workers, **({"prefetch_factor": 4, "persistent_workers": True} if workers else {}))
    rates = []
    batches = iter(loader)
    for _ in range(6):
        samples, begun, start = 0, time.monotonic(), processor_s(batches)
        while time.monotonic() - begun < seconds / 6:
            try:
                samples += len(next(batches)[1])
            except StopIteration:
                batches = iter(loader)
        rates.append(samples / (processor_s(batches) - start))
    print("| %s | %d | %.4f |" % (workers or "none", batch, statistics.median(rates[1:]) * 1e-6), flush=True)


def slow_samples(workers, compute_s, share):
    fetch_s = compute_s * workers * share / BATCH
    waits = 0
    batches = iter(DataLoader(Slow(fetch_s), BATCH, shuffle=True, num_workers=workers))
    for step in range(-FIRST, STEPS):
        before = time.monotonic()
        if step == 0:
            begun = before
        next(batches)
        if step >= 0:
            waits += time.monotonic() - before
        time.sleep(compute_s)
    begun = time.monotonic() - begun
    print("| %d | %.1f | %.1f | %.0f%% | %.2f | %.3f |" % (workers, compute_s * 1e3, fetch_s * BATCH * 1e3, 100 * share, begun / STEPS * 1e3,
                                                     waits / STEPS * 1e3), flush=True)


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1
    cores = os.sched_getaffinity(0)
    warnings.filterwarnings("ignore")  # the warning is about more workers than cores
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(cores)})
    print("| DataLoader of PyTorch %s: workers | samples per batch | million samples/s on one core |\n|---|---|---|" % torch.__version__)
    for workers in (0, 1):
        for batch in (1, 8, 64, 512):
            small_samples(workers, batch, seconds)
    os.sched_setaffinity(0, cores)
    print("\n| DataLoader: workers | compute, ms | one worker fetches a batch, ms | of compute x workers | step, ms | wait, ms |\n|---|---|---|---|---|---|")
    for workers in (1, 2, 4, 8):
        slow_samples(workers, 0.02, 0.8)
    for workers in (1, 4):
        slow_samples(workers, 0.02, 1.5)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""ddp_sampler against torch.utils.data.DistributedSampler, index for index.

    python3 tests/parity/sampler_torch.py            some hundred samplers, up to 3 million samples
    python3 tests/parity/sampler_torch.py --large    also around 214748364 samples, where PyTorch changes its rule (4 GB, minutes)

Without PyTorch 2.6 or newer it prints SKIP and exits with 77."""
import os
import random
import subprocess
import sys
import tempfile

try:
    import torch
    from torch.utils.data import DistributedSampler
except ImportError:
    print("SKIP: PyTorch is not installed for this Python")
    sys.exit(77)
if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 6):
    print("SKIP: PyTorch 2.6 or newer is needed, this is " + torch.__version__)
    sys.exit(77)

# Reads one sampler per line, writes its length and its samples as 64-bit integers.
DRIVER = r"""
#define DDP_IMPLEMENTATION
#include "ddp.h"
int main(void) {
    long long size, seed, epoch, window;
    ddp_sampler_desc desc = DDP_ZERO;
    while (scanf("%lld %d %d %lld %lld %d %d %lld", &size, &desc.num_replicas, &desc.rank, &seed, &epoch, &desc.no_shuffle,
                 &desc.drop_last, &window) == 8) {
        ddp_sampler sampler;
        int64_t value;
        desc.dataset_size = size;
        desc.seed = (uint64_t)seed;
        desc.window = window;
        if (ddp_sampler_init(&sampler, &desc) != DDP_OK) { fprintf(stderr, "%s\n", ddp_last_error()); return 1; }
        ddp_sampler_set_epoch(&sampler, (uint64_t)epoch);
        value = ddp_sampler_length(&sampler);
        fwrite(&value, sizeof value, 1, stdout);
        while ((value = ddp_sampler_next(&sampler, NULL)) >= 0) fwrite(&value, sizeof value, 1, stdout);
        fflush(stdout);
        ddp_sampler_free(&sampler);
    }
    return 0;
}
"""


class Driver:
    def __init__(self, folder):
        root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
        source, program = os.path.join(folder, "driver.c"), os.path.join(folder, "driver")
        with open(source, "w") as file:
            file.write(DRIVER)
        subprocess.check_call([os.environ.get("CC", "cc"), "-std=gnu11", "-O2", "-I", root, source, "-o", program, "-lm", "-lpthread"])
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def samples(self, *case):
        self.process.stdin.write((" ".join(str(int(value)) for value in case) + "\n").encode())
        self.process.stdin.flush()
        count = int.from_bytes(self.process.stdout.read(8), sys.byteorder)
        data = bytearray(self.process.stdout.read(8 * count))
        assert len(data) == 8 * count, "the driver ended early"
        return torch.frombuffer(data, dtype=torch.int64) if count else torch.empty(0, dtype=torch.int64)


def cases():
    pick = random.Random(1)
    for _ in range(400):
        size = pick.choice([1, 2, 3, 10, 100, 623, 624, 625, pick.randint(1, 5000), pick.randint(1, 60000)])
        replicas = pick.choice([1, 2, 3, 4, 8, 13, 64])
        yield (size, replicas, pick.randrange(replicas), pick.choice([0, 42, 2**32 - 1, 2**40 + 7, pick.randrange(2**62)]),
               pick.choice([0, 1, 1000]), pick.random() < 0.1, pick.random() < 0.5, pick.choice([0, 0, 1 + size // 3, 1 + size // 50]))
    yield (3000000, 8, 5, 7, 3, False, False, 0)
    yield (3000000, 7, 6, 7, 3, False, True, 40000)


def main():
    with tempfile.TemporaryDirectory() as folder:
        driver, count = Driver(folder), 0
        for case in cases():
            size, replicas, rank, seed, epoch, no_shuffle, drop_last, _ = case
            sampler = DistributedSampler(range(size), num_replicas=replicas, rank=rank, shuffle=not no_shuffle, seed=seed, drop_last=drop_last)
            sampler.set_epoch(epoch)
            if not torch.equal(driver.samples(*case), torch.tensor(list(sampler), dtype=torch.int64)):
                print("size, replicas, rank, seed, epoch, no_shuffle, drop_last, window =", case, "differs from PyTorch")
                return 1
            count += 1
        for size in (214748363, 214748364, 214748371) if "--large" in sys.argv[1:] else ():
            order = torch.randperm(size, generator=torch.Generator().manual_seed(3))
            for replicas, rank in ((8, 2), (64, 63)):       # size - rank entries, and where they do not divide one of padding
                expected = order[rank::replicas]
                if len(expected) < -(-size // replicas):
                    expected = torch.cat((expected, order[(rank - size) % replicas].reshape(1)))
                if not torch.equal(driver.samples(size, replicas, rank, 1, 2, False, False, 0), expected):
                    print("size %d, rank %d of %d differs from PyTorch" % (size, rank, replicas))
                    return 1
                count += 1
        driver.process.stdin.close()
        if driver.process.wait():
            return 1
    print("%d samplers equal PyTorch %s" % (count, torch.__version__))
    return 0


sys.exit(main())

#!/usr/bin/env python3
"""A reader and writer of llm.c's files that shares no code with examples/extras/llmc.h: each reads the files of the
other.

    llmc_numpy.py path/of/llmc

Ends with 77 (skipped) if NumPy is not installed (Debian, Ubuntu: apt-get install python3-numpy).
"""
import os
import re
import subprocess
import sys
import tempfile

try:
    import numpy as np
except ImportError:
    print("skipped: no NumPy (apt-get install python3-numpy)")
    sys.exit(77)


def expect(condition, what):
    if not condition:
        sys.exit("FAIL: %s" % what)


def shapes(V, T, L, C):
    """Name, layers and shape of each tensor, in the order of the file; None: not one of each layer."""
    return [("wte", None, (V, C)), ("wpe", None, (T, C)), ("ln1.weight", L, (C,)), ("ln1.bias", L, (C,)), ("attn.qkv.weight", L, (3 * C, C)),
            ("attn.qkv.bias", L, (3 * C,)), ("attn.proj.weight", L, (C, C)), ("attn.proj.bias", L, (C,)), ("ln2.weight", L, (C,)), ("ln2.bias", L, (C,)),
            ("mlp.fc.weight", L, (4 * C, C)), ("mlp.fc.bias", L, (4 * C,)), ("mlp.proj.weight", L, (C, 4 * C)), ("mlp.proj.bias", L, (C,)),
            ("ln_f.weight", None, (C,)), ("ln_f.bias", None, (C,))]


def to_bf16(values):
    """Nearest bf16, ties to even, by comparing both neighbours in double precision; as uint16."""
    low = values.view("<u4") >> 16
    high = low + 1
    exact = values.astype("f8")
    below = np.abs(exact - (low << 16).astype("<u4").view("<f4").astype("f8"))
    above = np.abs((high << 16).astype("<u4").view("<f4").astype("f8") - exact)
    return np.where((above < below) | ((above == below) & (high % 2 == 0)), high, low).astype("<u2")


def read(path):
    head = np.fromfile(path, "<i4", 256)
    expect(head[0] == 20240326 and head[1] in (3, 5) and not head[8:].any(), "header %s" % head[:9])
    T, V, L, NH, C, Vp = map(int, head[2:8])
    kind = "<f4" if head[1] == 3 else "<u2"
    body, tensors, at = np.fromfile(path, kind, offset=1024), {}, 0
    for name, layers, shape in shapes(Vp, T, L, C):
        shape = shape if layers is None else (layers,) + shape
        count = int(np.prod(shape))
        tensors[name] = body[at:at + count].reshape(shape)
        at += count
    expect(at == body.size, "%d elements, not %d" % (body.size, at))
    return head[:8].tolist(), tensors


def write(path, head, tensors):
    with open(path, "wb") as file:
        file.write(np.concatenate([np.array(head, "<i4"), np.zeros(248, "<i4")]).tobytes())
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def main():
    with tempfile.TemporaryDirectory() as work:
        theirs, ours, text = (os.path.join(work, name) for name in ("theirs.bin", "ours.bin", "text"))

        def tool(*more):
            ran = subprocess.run([sys.argv[1], *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            expect(ran.returncode == 0, "%s: %d %s" % (" ".join(more), ran.returncode, ran.stdout))
            return ran.stdout

        random = np.random.default_rng(1)
        for V, Vp, T, L, NH, C in ((11, 16, 5, 3, 2, 8), (1, 1, 1, 1, 1, 1), (300, 384, 7, 2, 3, 12)):
            head = [20240326, 3, T, V, L, NH, C, Vp]
            tensors = {name: random.standard_normal(shape if layers is None else (layers,) + shape).astype("<f4")
                       for name, layers, shape in shapes(Vp, T, L, C)}
            tensors["wte"][V:] = 0
            half = {name: to_bf16(tensor) for name, tensor in tensors.items()}
            wide = {name: (tensor.astype("<u4") << 16).view("<f4") for name, tensor in half.items()}

            def copied(version, what, *dtype):  # the copy has this version and these tensors
                tool("--model", ours, "--from", theirs, *dtype)
                got, made = read(ours)
                expect(got == [20240326, version] + head[2:], "header %s" % got)
                for name in what:
                    expect(made[name].dtype == what[name].dtype and np.array_equal(made[name], what[name]), "%s %s" % (name, head))

            write(theirs, head, tensors)
            copied(3, tensors)
            copied(5, half, "--dtype", "bf16")
            lines = tool("--show", theirs).splitlines()[1:]
            for name, mean in ((line.split()[0], float(re.search(r"mean (\S+)", line).group(1))) for line in lines):
                layer = re.match(r"h\.(\d+)\.(.*)", name)
                tensor = tensors[layer.group(2)][int(layer.group(1))] if layer else tensors[name][:V] if name == "wte" else tensors[name]
                expect(abs(tensor.mean(dtype="f8") - mean) < 1e-2 * abs(mean) + 1e-6, "%s: %g, not %g" % (name, mean, tensor.mean()))
            expect(len(lines) == 2 + 12 * L + 2, "--show has %d lines" % len(lines))
            write(theirs, [20240326, 5] + head[2:], half)
            copied(5, half)
            copied(3, wide, "--dtype", "f32")

        tool("--model", ours, "--vocab", "500", "--context", "9", "--layers", "2", "--heads", "2", "--channels", "64")
        made = read(ours)[1]
        expect(not made["wte"][500:].any() and abs(made["wte"][:500].std() - 0.02) < 1e-3, "random values of wte")
        expect(abs(made["attn.proj.weight"].std() - 0.01) < 1e-3, "random values of attn.proj.weight")

        with open(text, "wb") as file:
            file.write(bytes(range(256)) * 40)
        tool("--tokens", ours, text)
        shard = np.fromfile(ours, "<u2", offset=1024)
        expect(np.fromfile(ours, "<i4", 3).tolist() == [20240520, 1, 10240] and np.array_equal(shard, np.tile(np.arange(256), 40)), "shard of text")
        tool("--tokens", ours, "--count", "5000", "--vocab", "1000")
        shard = np.fromfile(ours, "<u2", offset=1024)
        expect(shard.size == 5000 and shard.max() < 1000 and np.unique(shard).size > 900, "random shard")


main()

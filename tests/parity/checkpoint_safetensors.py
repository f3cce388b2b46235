#!/usr/bin/env python3
"""Python's package `safetensors` reads the checkpoints of ddp, and ddp reads those of the package.

    checkpoint_safetensors.py checkpoint_tool

Ends with 77 (skipped) if the package is not installed (pip install safetensors).
"""
import ctypes
import json
import os
import subprocess
import sys
import tempfile

try:
    import safetensors
except ImportError:
    print("skipped: no safetensors (pip install safetensors)")
    sys.exit(77)

MASK = (1 << 64) - 1
LONG = 301
# support/checkpoints.h
MODEL = [("wte", "F32", [7, 5]), ("h.weight", "BF16", [4, 3, 2]), ("scalar", "F32", []), ("empty", "F32", [0, 4]), ("columns", "I32", [6, 8]),
         ("middle", "F16", [4, 6, 3]), ("\u00e9 \"\\\n", "I8", [5]), ("long", "F32", [3, LONG]), ("wide", "F64", [2, LONG * 2 // 3]), ("bytes", "U8", [1]),
         ("u64", "U64", [2]), ("i64", "I64", [9])]
OPTIMIZER = [("wte", "F32", [7, 5]), ("wte.exp_avg_sq", "F64", [7, 5]), ("long.exp_avg", "F32", [3, 1001])]
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
WORDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "U64": "uint64", "I32": "int32", "I16": "int16", "I8": "int8",
         "U8": "uint8", "BOOL": "bool"}


def byte_of(version, tensor, b):
    x = ((b + 1) * 0x9E3779B97F4A7C15 + (version * 100 + tensor) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 31)) * 0x94D049BB133111EB) & MASK
    return x >> 56


def data_of(version, tensor, dtype, shape):
    count = SIZES[dtype]
    for entry in shape:
        count *= entry
    return bytes(byte_of(version, tensor, b) for b in range(count))


def write(path, tensors):
    """tensors: name -> (dtype, shape, bytes). The package has had two ways to take them."""
    keep = []
    if hasattr(safetensors, "TensorSpec"):
        specs = {}
        for name, (dtype, shape, data) in tensors.items():
            keep.append(ctypes.create_string_buffer(data, max(len(data), 1)))
            specs[name] = safetensors.TensorSpec(dtype=WORDS[dtype], shape=shape, data_ptr=ctypes.addressof(keep[-1]), data_len=len(data))
    else:
        specs = {name: {"dtype": WORDS[dtype], "shape": shape, "data": data} for name, (dtype, shape, data) in tensors.items()}
    with open(path, "wb") as file:
        file.write(safetensors.serialize(specs, {"made": "in Python"}))


def expect(condition, what):
    if not condition:
        sys.exit("FAIL: %s" % what)


def main():
    def tool(*arguments):
        ran = subprocess.run([sys.argv[1], *arguments], stdout=subprocess.PIPE, text=True)
        return ran.returncode, ran.stdout

    with tempfile.TemporaryDirectory() as work:
        ours = os.path.join(work, "ours")
        expect(tool("save", ours, "3") == (0, ""), "save")
        for kind, first, tensors in (("model", 0, MODEL), ("optimizer", len(MODEL), OPTIMIZER)):
            with open(os.path.join(ours, kind + ".safetensors.index.json")) as file:
                index = json.load(file)
            read, total = {}, 0
            for name in sorted(set(index["weight_map"].values())):
                with open(os.path.join(ours, name), "rb") as file:
                    content = file.read()
                expect(len(content) <= 3000 or len([n for n in index["weight_map"].values() if n == name]) == 1, "%s has %d bytes" % (name, len(content)))
                for key, value in safetensors.deserialize(content):
                    expect(index["weight_map"][key] == name, "%s in the index" % key)
                    read[key] = value
                header = json.loads(content[8:8 + int.from_bytes(content[:8], "little")])
                expect(header["__metadata__"]["format"] == "pt", "metadata")
                expect(all(key == "__metadata__" or "crc32c:" + key in header["__metadata__"] for key in header), "checksums")
            expect(len(read) == len(tensors), "%d tensors of %d" % (len(read), len(tensors)))
            for number, (name, dtype, shape) in enumerate(tensors, first):
                want = data_of(3, number, dtype, shape)
                expect(read[name]["dtype"] == dtype and list(read[name]["shape"]) == shape and bytes(read[name]["data"]) == want, "tensor %r" % name)
                total += len(want)
            expect(index["metadata"]["total_size"] == total, "total_size")
        with open(os.path.join(ours, "state.json")) as file:
            expect(json.load(file)["step"] == 3, "state.json")
        expect(tool("load", ours, "3") == (0, ""), "load")

        theirs = os.path.join(work, "theirs")
        os.mkdir(theirs)
        tensors = {name: (dtype, shape, data_of(5, number, dtype, shape)) for number, (name, dtype, shape) in enumerate(MODEL)}
        write(os.path.join(theirs, "model.safetensors"), tensors)
        code, text = tool("foreign", theirs, "5")
        expect(code == 0, "foreign: " + text)
        code, text = tool("load", theirs, "5")
        expect(code == 1, "a model alone has no optimizer state to load")
        for name, dtype in (("steps", "I16"), ("mask", "BOOL")):
            write(os.path.join(theirs, "model.safetensors"), dict(tensors, **{name: (dtype, [2], bytes(2 * SIZES[dtype]))}))
            code, text = tool("foreign", theirs, "5")
            expect(code == 1 and "'%s'" % name in text and dtype + " [2]" in text and "not among the 12" in text, "extra tensor: " + text)
    print("ok, safetensors %s" % safetensors.__version__)


if __name__ == "__main__":
    main()

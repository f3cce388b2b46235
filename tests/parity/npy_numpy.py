#!/usr/bin/env python3
"""NumPy reads the .npy files of ddp, and ddp reads those of NumPy.

    npy_numpy.py npy_tool

Ends with 77 (skipped) if NumPy is not installed (Debian, Ubuntu: apt-get install python3-numpy).
"""
import os
import subprocess
import sys
import tempfile

try:
    import numpy as np
except ImportError:
    print("skipped: no NumPy (apt-get install python3-numpy)")
    sys.exit(77)

NAMES = {"<f4": "f32", "<f8": "f64", "<f2": "f16", "|i1": "i8", "|u1": "u8", "<i4": "i32", "<i8": "i64", "<u8": "u64"}
SHAPES = [(), (1,), (7,), (3, 4), (2, 0, 5), (2, 3, 4, 5), (1,) * 8, (1000, 301)]


def expect(condition, what):
    if not condition:
        sys.exit("FAIL: %s" % what)


def main():
    with tempfile.TemporaryDirectory() as work:
        theirs, ours = os.path.join(work, "theirs.npy"), os.path.join(work, "ours.npy")

        def tool(*more):
            if os.path.exists(ours):
                os.unlink(ours)
            ran = subprocess.run([sys.argv[1], theirs, ours, *more], stdout=subprocess.PIPE, text=True)
            return ran.returncode, ran.stdout

        def refused(words):
            code, text = tool()
            expect(code == 1 and words in text and theirs in text and not os.path.exists(ours), "wanted \"%s\", have %d \"%s\"" % (words, code, text))

        random = np.random.default_rng(1)
        for descr, name in NAMES.items():
            for shape in SHAPES:
                count = int(np.prod(shape, dtype=np.int64))
                array = np.frombuffer(random.bytes(count * np.dtype(descr).itemsize), descr).reshape(shape)
                for version in ((1, 0), (2, 0), (3, 0)):
                    with open(theirs, "wb") as file:
                        np.lib.format.write_array(file, array, version=version)
                    code, text = tool()
                    expect(code == 0, text)
                    expect(text.startswith("%s (%s) REPLICATE\n" % (name, ", ".join(map(str, shape)))), text)
                    back = np.load(ours)
                    expect(back.dtype == array.dtype and back.shape == array.shape and back.tobytes() == array.tobytes(), "%s %s" % (descr, shape))
                    mapped = np.load(ours, mmap_mode="r")
                    expect(mapped.offset % 64 == 0 and mapped.tobytes() == array.tobytes(), "mapped")

        bits = np.array([0x3f80, 0xbf80, 0x7f80], "<u2")  # 1, -1, infinity
        np.save(theirs, bits)
        refused("its elements are '<u2', which is not a ddp_dtype; to load bf16, set out->dtype to DDP_BF16")
        code, text = tool("bf16")
        expect(code == 0 and text.split() == ["bf16", "(3)", "REPLICATE", "1", "-1", "inf"], text)
        expect(np.array_equal(np.load(ours), bits), "bits of bf16")

        np.save(theirs, np.asfortranarray(np.ones((3, 4), "<f4")))
        refused("(3, 4) in Fortran order")
        for array, words in ((np.ones(3, ">f8"), "'>f8'"), (np.ones(3, bool), "'|b1'"), (np.ones(3, complex), "'<c16'"), (np.array(["a", "bc"]), "'<U2'"),
                             (np.zeros(3, [("a", "<f4"), ("b", "<i4")]), "its elements are records"), (np.zeros((1,) * 9), "9 dimensions, more than 8")):
            np.save(theirs, array)
            refused(words)
        np.save(theirs, np.ones((3, 4)))
        with open(theirs, "rb") as file:
            whole = file.read()
        for cut in (0, 5, 9, 30, len(whole) - 1):
            with open(theirs, "wb") as file:
                file.write(whole[:cut])
            refused("there should be \\x93NUMPY" if cut < 6 else "ends at byte %d" % cut)
        with open(theirs, "wb") as file:
            file.write(whole.replace(b"(3, 4)", b"[3, 4]"))
        refused("there should be the ( of a shape")


main()

#!/usr/bin/env python3
"""The example checkpoint.c: each pair of 1, 2 and 4 ranks ends with the same weights, and the Python lines of its
comment read weights with the hash that the program printed. Wrong arguments are one sentence, and so are ranks of mpirun.

    checkpoint_example.py path/of/program path/of/checkpoint.c
"""
import gzip
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import textwrap

program, source = (os.path.abspath(path) for path in sys.argv[1:])
slow = int(os.environ.get("DDP_TEST_SLOWDOWN", "1")) > 1
SHAPES = {"w0": (784, 32), "b0": (32,), "w1": (32, 10), "b1": (10,)}
FASHION = "/usr/share/datasets/fashion-mnist/"


def expect(condition, text):
    if not condition:
        sys.exit("FAILED: %s" % text)


def run(*arguments, launcher=()):
    done = subprocess.run([*launcher, program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def fnv(data):
    value = 14695981039346656037
    for byte in data:
        value = (value ^ byte) * 1099511628211 % (1 << 64)
    return "%016x" % value


def read_weights():
    """Executes the lines of the comment."""
    with open(source) as file:
        lines = re.search(r"\n( {8}import json.*?)\n\n", file.read(), re.S).group(1)
    scope = {}
    exec(textwrap.dedent(lines), scope)
    return scope["weights"]


def check_weights(hash_of_save):
    weights = read_weights()
    expect(set(weights) == set(SHAPES), "tensors %s" % sorted(weights))
    data = b""
    for name, shape in SHAPES.items():
        expect(len(weights[name]) == shape[0] * (shape[1] if len(shape) > 1 else 1), "%s has %d values" % (name, len(weights[name])))
        data += struct.pack("<%df" % len(weights[name]), *weights[name])
    expect(fnv(data) == hash_of_save, "Python reads weights %s, saved were %s" % (fnv(data), hash_of_save))


def sentence(expected, *arguments):
    code, _, error = run(*arguments)
    expect(code == 1 and expected in error and error.count("\n") == 1, "%s: status %d, no '%s' in: %s" % (arguments, code, expected, error))


def check_fashion():
    """The same on Fashion-MNIST, where it is installed; wrong files are one sentence."""
    os.mkdir("data")
    sentence("train-images-idx3-ubyte is missing, or not a file of MNIST", "1", "1", "saved", "data")
    for name in "train-images-idx3-ubyte", "train-labels-idx1-ubyte":
        with gzip.open(FASHION + name + ".gz") as packed, open("data/" + name, "wb") as file:
            shutil.copyfileobj(packed, file)
    code, text, error = run("2", "4", "saved", "data")
    hashes = re.findall(r"weights ([0-9a-f]{16})", text)
    expect(code == 0 and len(hashes) == 3 and hashes[0] == hashes[2] != hashes[1], "Fashion-MNIST: status %d: %s%s" % (code, text, error))
    with open("data/train-labels-idx1-ubyte", "r+b") as file:
        file.write(b"\n" * 60008)  # all are 10
    sentence("a label is not below 10", "1", "1", "saved", "data")


with tempfile.TemporaryDirectory() as work:
    os.chdir(work)
    ends = set()
    for ranks in ([],) if slow else ([], ["1", "4"], ["4", "1"]):
        code, text, error = run(*ranks)
        hashes = re.findall(r"weights ([0-9a-f]{16})", text)
        expect(code == 0 and len(hashes) == 3 and hashes[0] == hashes[2] != hashes[1], "%s: status %d: %s%s" % (ranks, code, text, error))
        ends.add((hashes[1], hashes[2]))
        check_weights(hashes[1])
    expect(len(ends) == 1, "the hash depends on the number of ranks: %s" % ends)
    expect(os.listdir() == ["saved_model"], "other files: %s" % os.listdir())
    code, text, error = run("2", "1", "elsewhere")
    expect(code == 0 and "saved to elsewhere" in text and os.path.isfile("elsewhere/state.json"), "another folder: %s%s" % (text, error))
    if slow:
        sys.exit(0)
    sentence("usage: ", "x")
    sentence("usage: ", "2", "1", "folder", "data", "more")
    sentence("3 ranks: use 1, 2 or 4", "3")
    sentence("3 ranks: use 1, 2 or 4", "2", "3")
    sentence("cannot open the folder of dir, missing: ", "1", "1", "missing/folder")
    os.mkdir("mine")
    open("mine/letter", "w").close()
    sentence("mine has 'letter', which is not part of a checkpoint", "1", "1", "mine")
    expect(os.listdir("mine") == ["letter"], "the save changed a folder of other files")
    if os.path.exists(FASHION):
        check_fashion()
    if shutil.which("mpirun"):
        code, text, error = run("2", "1", "mpirun_folder", launcher=["mpirun", "-n", "2"])
        expect(code != 0 and "mpirun or another launcher started the ranks: run without it" in error, "under mpirun: status %d: %s" % (code, error))
        expect("weights" not in text and not os.path.exists("mpirun_folder"), "under mpirun it continues: %s" % text)
print("the same weights after a save and a load on other ranks, and in Python")

#!/usr/bin/env python3
"""examples/fits.c against published batches, and against the table in examples/troubleshooting.md.

    fits.py path/of/fits

Published for T5-large on 4 GPUs of 16 GB, f32, SGD with momentum: the largest global batches below, and T5-3b
trains only with FSDP. One calibration, by the batch of one GPU, is used for all other figures.
"""
import os
import re
import subprocess
import sys

PUBLISHED = {"one rank": 14, "DataParallel": 36, "DDP": 48, "ZeRO-3, one unit": 64}
T5 = ["--optimizer", "momentum", "--tokens", "64"]


def run(program, arguments):
    """The calibrated --scale, and for each strategy the batches of all ranks: plain, recompute, offload, both."""
    out = subprocess.run([program] + arguments, check=True, capture_output=True, text=True).stdout
    rows = {}
    for line in re.findall(r"^\| (.*) \|$", out, re.M)[1:]:
        cells = line.split(" | ")
        rows[cells[0]] = [0 if cell == "-" else int(re.fullmatch(r"\d+ \((\d+)\)", cell)[1]) for cell in cells[2:]]
    return re.search(r"--scale (\S+)", out)[1], rows


def check_published(program):
    scale, large = run(program, ["--model", "t5-large", "--fit", "14"] + T5)
    for name, batch in PUBLISHED.items():
        have = large[name][0]
        print("%s: %d, published %d: %+.0f%%" % (name, have, batch, 100.0 * (have - batch) / batch))
        assert abs(have - batch) <= 0.15 * batch, "%s: more than 15%% off" % name
    assert large["one rank"][0] == 14, "--fit 14 lets %d fit" % large["one rank"][0]
    batches = [large[name][0] for name in PUBLISHED]
    assert batches == sorted(set(batches)), "the order is not that of the published batches: %s" % batches
    for column in (0, 1):  # without offload
        assert large["DDP"][column] < large["ZeRO-1"][column] < large["ZeRO-2"][column] < large["ZeRO-3"][column]
    _, larger = run(program, ["--model", "t5-3b", "--scale", scale] + T5)
    fitting = [name for name in larger if larger[name][0] or larger[name][1]]
    assert fitting == ["ZeRO-3"], "T5-3b fits with %s" % fitting


def check_page(program, page):
    """The last columns of the table: of all ranks, plain / recompute, by the commands before the table."""
    columns = [run(program, command.split())[1] for command in re.findall(r"`\./fits ([^`]*)`", page)]  # a command may continue on the next line
    checked = 0
    for line in re.findall(r"^\| (.*) \|$", page, re.M):
        cells = line.split(" | ")
        if cells[0] not in columns[0]:
            continue
        for have, rows in zip(cells[-len(columns) :], columns):
            want = "%d / %d" % tuple(rows[cells[0]][:2]) if rows[cells[0]][1] else "-"
            assert have == want, "troubleshooting.md, %s: %s, but fits prints %s" % (cells[0], have, want)
            checked += 1
    assert checked == 2 * len(columns[0]), "%d figures in troubleshooting.md" % checked


def main(argv):
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
    check_published(argv[1])
    with open(os.path.join(root, "examples", "troubleshooting.md"), encoding="utf-8") as file:
        check_page(argv[1], file.read())
    print("fits: near the published batches, and as in troubleshooting.md")


if __name__ == "__main__":
    main(sys.argv)

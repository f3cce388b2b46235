#!/usr/bin/env python3
"""gpt.py - GPT-2 on one GPU: examples/gpt/train_gpt_cuda.cu and PyTorch in turns, and a profile of the step.
Started by bench/gpu/run.sh.

    gpt.py [--out DIR] [--minutes 5] [--rounds 3] [--programs DIR] [--dry-run] [--build DIR]

1. Builds those of train_gpt_cuda, bench_gpt and llmc that are missing or out of date in --programs
   (build/gpu). Makes a random shard and random initial values, while PyTorch compiles its model. --dry-run
   prints these and all other commands, and ends.
2. One step of the trainer by kernel.
3. 124M, 32 x 1024, in rounds of one turn each: the trainer (--strategy none: gradients reduced, nothing
   sharded),
   PyTorch with f32 weights and bf16 products, PyTorch with bf16 weights, a step without a reducer
   (bench_gpt.cu), the trainer with --strategy full (ZeRO-3). A turn is some dozens of steps; the
   median counts, without the first ones. A ratio is the median over rounds of the ratio within a round. The
   timeline of three steps shows how long the host takes to launch a step, and how long the device is idle.
4. 1.5B, 16 x 1024, recomputing blocks: the trainer and PyTorch in turns.

Targets: the trainer at 1.0 times the tokens of PyTorch's faster setting; reducer 1% of a step at most, ZeRO-3
on one rank 3% at most; the host ahead of the device. Writes gpt.json and gpt.md to DIR after every turn. A
program that fails is noted and left out; the others continue.

Steps of the trainer are timed by its progress lines, each printed when the device has done the step: from one
to the next, without a validation between them. The others' steps are timed by events. MFU counts
gpt_cuda_flops over 989 TFLOP/s, dense bf16 by the datasheet of an H100 or H200. The limit of a kernel is the
longer of its FLOPs at that rate and its bytes at the rate of a copy on this device, which bench_gpt
measures."""
import argparse
import ctypes
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, HERE)
import predict_gpt  # noqa: E402

PEAK = 989e12
SHAPES = {"124M": ["--layers", "12", "--heads", "12", "--channels", "768"], "1.5B": ["--layers", "48", "--heads", "25", "--channels", "1600"]}
BATCH = {"124M": 32, "1.5B": 16}
STEPS = {"124M": 100, "1.5B": 20}  # of a turn of the trainer
TURN = {"124M": 40, "1.5B": 8}     # of a peer's, which has no validation
WARM = {"124M": 10, "1.5B": 4}     # of the trainer that are not counted, and of a peer before its first turn
PROFILED = 30                      # steps of the run whose sixth is shown by kernel
LENGTH = 1024


class Commands:
    """Every command of a run, as words. Data goes to build."""

    def __init__(self, build, programs):
        self.build = build
        self.shard, self.python = os.path.join(build, "noise.bin"), os.environ.get("PYTHON", "python3")
        names = ("train_gpt_cuda", "bench_gpt", "llmc")
        self.trainer, self.bare, self.llmc = (os.path.join(programs, name) for name in names)
        script = os.path.join(ROOT, "tests", "gpu", "run.sh")
        trainer, bare, self.compile_llmc = (["sh", script, "programs", programs, name] for name in names)
        self.compile = [trainer, bare]

    def data(self, size):
        return [self.llmc, "--model", self.values(size), "--dtype", "bf16", *SHAPES[size]]

    def tokens(self):
        return [self.llmc, "--tokens", self.shard, "--count", "2000000", "--vocab", "50257"]

    def values(self, size):
        return os.path.join(self.build, size + ".bin")

    def train(self, size, strategy, steps, *more):
        batch = str(BATCH[size])
        return [self.trainer, "--init", self.values(size), "--context", str(LENGTH), "--micro-batch", batch, "--batch", batch, "--lr", "6e-4", "--steps",
                str(steps), "--strategy", strategy, *(["--recompute"] if size == "1.5B" else []), *self.with_table(size), *more, self.shard]

    def torch(self, size, precision):
        large = ["--recompute", "--compile", "blocks"] if size == "1.5B" else []
        return [self.python, os.path.join(HERE, "peer_gpt_torch.py"), self.shard, "--size", size, "--batch", str(BATCH[size]), "--length", str(LENGTH),
                "--precision", precision, *large]

    def bench(self, *more):
        return [self.bare, "--batch", str(BATCH["124M"]), "--length", str(LENGTH), *self.with_table("124M"), *more]

    def table(self, size):
        return os.path.join(self.build, "gemm_table_%s.txt" % size)

    def with_table(self, size):
        """Flags for the programs of a size, once tune has written its table."""
        return ["--gemm-table", self.table(size)] if os.path.exists(self.table(size)) else []

    def tune(self, size):
        """The products of all blocks are the same: one block is enough."""
        shape = ["--layers", "1", *SHAPES[size][2:], "--batch", str(BATCH[size]), "--length", str(LENGTH)]
        return [self.bare, "--tune", self.table(size), *shape]

    def all(self):
        """All commands, in the order of a run."""
        timeline = os.path.join(self.build, "timeline.json")
        return self.compile + [
            self.compile_llmc, self.tokens(), self.data("124M"), self.data("1.5B"), self.tune("124M"), self.tune("1.5B"), self.train("124M", "none", STEPS["124M"], "--timeline", timeline),
            self.torch("124M", "autocast"), self.torch("124M", "bf16"), self.bench(), self.train("124M", "full", STEPS["124M"]),
            self.train("124M", "none", PROFILED, "--profile"), self.train("1.5B", "none", STEPS["1.5B"]), self.torch("1.5B", "autocast")]


class Failed(Exception):
    pass


class Left(Exception):
    """PyTorch is missing on this machine."""


class Peer:
    """A program that answers "steps N" with a line of JSON and waits in between."""

    def __init__(self, words, limit):
        self.words = words
        self.errors = tempfile.TemporaryFile(mode="w+")
        self.program = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        try:
            self.about = self.line(limit)
        except BaseException:
            self.close()
            raise

    def line(self, limit):
        watch = threading.Timer(max(limit, 1), self.program.kill)
        watch.start()
        text = self.program.stdout.readline()
        watch.cancel()
        if text:
            return json.loads(text)
        status = self.program.wait()  # its output has ended
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines() or ["killed after %.0f s" % limit]
        if status == 77:
            raise Left(lines[-1])
        raise Failed("%s: status %d: %s" % (os.path.basename(self.words[0]), status, lines[-1]))

    def steps(self, count, limit):
        self.program.stdin.write("steps %d\n" % count)
        self.program.stdin.flush()
        return self.line(limit)

    def close(self):
        """Closes the input of the program; kills it if it does not end then."""
        watch = threading.Timer(20, self.program.kill)
        watch.start()
        self.program.communicate()
        watch.cancel()
        self.errors.close()


def run(words, limit, cwd=None):
    """Output of a command that ends by itself."""
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=max(limit, 1), cwd=cwd)
    if done.returncode:
        raise Failed("%s: status %d: %s" % (shlex.join(words), done.returncode, done.stdout.strip()[-2000:]))
    return done.stdout


def read_progress(lines, clock=time.perf_counter):
    """Milliseconds by step: the interval that ends with the progress line of the step, {15: 31.2, ...}. And
    all text."""
    took, text, last = {}, [], None
    for line in lines:
        now = clock()
        text.append(line)
        found = re.match(r"step +(\d+)/\d+ +(loss|validation)", line)
        if found and found.group(2) == "validation":
            last = None
        elif found:
            step = int(found.group(1))
            if last and step > last[0]:
                took[step] = (now - last[1]) * 1e3 / (step - last[0])
            last = (step, now)
    return took, "".join(text)


def train(words, limit, cwd):
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd) as program:
        watch = threading.Timer(max(limit, 1), program.kill)
        watch.start()
        took, text = read_progress(program.stdout)
        status = program.wait()
        watch.cancel()
    if status:
        raise Failed("%s: status %d: %s" % (shlex.join(words), status, text.strip()[-2000:]))
    return took, text


def median_of(took, warm):
    counted = [ms for step, ms in sorted(took.items()) if step > warm]
    if not counted:
        raise Failed("no step was counted: two progress lines without a validation between them are needed")
    return statistics.median(counted)


def read_table(text):
    """The last line of the trainer: {"strategy", "host_ms"}."""
    row = re.search(r"^ +\d+ +\d+ +\d+ +\d+ +(\w+) +\w+ +\d+ +[\d.]+ +(?:[\d.]+%|-) +([\d.]+) ms +([\d.]+) ms *$", text, re.M)
    return {"strategy": row.group(1), "host_ms": float(row.group(2))} if row else {}


def read_profile(text):
    """Rows of --profile: (kernel, launches, ms, share, TFLOP/s, GB/s). The page computes its own share of the
    limit."""
    rows = re.findall(r"^  (\S.*?) +(\d+) +([\d.]+) +([\d.]+)% +([\d.]+) +([\d.]+) +(?:[\d.]+%|-) *$", text, re.M)
    return [(name, int(n), float(ms), float(share), float(tera), float(giga)) for name, n, ms, share, tera, giga in rows]


def covered(spans):
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def read_timeline(events):
    """By step of a trace, milliseconds: time of the host to launch it (without packing and reading in
    between), time that the device works on it, and time that the device is idle in it."""
    spans = {}
    for e in events:
        if e.get("ph") == "X" and e["name"] not in ("pack", "read the step before"):
            spans.setdefault(e["args"]["step"], {}).setdefault(e["cat"], []).append((e["ts"] * 1e-3, (e["ts"] + e["dur"]) * 1e-3))
    whole = {e["args"]["step"] for e in events if e.get("name") == "optimizer"}  # a trace may end inside a step
    both = [spans[step] for step in sorted(spans) if step in whole and len(spans[step]) == 2]
    ends = [(min(b for b, _ in s["device"]), max(e for _, e in s["device"])) for s in both]
    busy = [covered(s["device"]) for s in both]
    return {"host_ms": [covered(s["host"]) for s in both], "device_ms": busy, "idle_ms": [e - b - ms for (b, e), ms in zip(ends, busy)]}


def join_quietly(join):
    """Waits for the chains, ignoring a failure: another one is already reported."""
    try:
        join()
    except Failed:
        pass


class Bench:
    def __init__(self, commands, minutes, rounds, out=None):
        self.c, self.rounds, self.out = commands, rounds, out
        self.deadline = time.time() + 60 * minutes
        self.notes, self.about = [], {}
        self.ms = {}  # (size, name): one median per round
        self.host_ms, self.profile, self.timeline, self.tuned = [], [], {}, {}
        self.failed = False

    def left(self):
        return self.deadline - time.time()

    def write(self):
        """Replaces gpt.json and gpt.md by the results so far, so that a killed run leaves them.
        Returns the page."""
        text = report(self)
        if self.out:
            self.replace("gpt.md", time.strftime("%Y-%m-%d\n\n", time.gmtime()) + text)
            self.replace("gpt.json", json.dumps({
                "ms": {"%s %s" % key: values for key, values in self.ms.items()},
                "about": self.about, "host_ms": self.host_ms,
                "profile": self.profile, "timeline": self.timeline, "tuned": self.tuned, "notes": self.notes}, indent=1))
        return text

    def replace(self, name, text):
        path = os.path.join(self.out, name)
        with open(path + ".new", "w") as file:
            file.write(text)
        os.replace(path + ".new", path)

    def note(self, text):
        print(text, flush=True)
        self.notes.append(text)

    def attempt(self, what, call, *arguments):
        """Notes a failure of the call and returns False then."""
        try:
            call(*arguments)
            return True
        except (Failed, OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            self.failed = True
            self.note("%s: failed: %s" % (what, error))
            return False
        finally:
            self.write()

    def start(self, *chains):
        """Starts chains of commands in parallel. Returns a function that waits for them, and fails if one of
        them failed."""
        threads, failures = [], []

        def work(chain):
            try:
                for words in chain:
                    run(words, self.left())
            except (Failed, OSError, subprocess.TimeoutExpired) as error:
                failures.append(error)

        def join():
            for thread in threads:
                thread.join()
            if failures:
                raise Failed(str(failures[0]))

        for chain in chains:
            threads.append(threading.Thread(target=work, args=(chain,)))
            threads[-1].start()
        return join

    def open_peers(self, size, wanted, peers):
        """Adds warmed-up programs that stay alive; notes the missing ones."""
        for name, words in wanted:
            try:
                peers[name] = Peer(words, self.left())
                self.about[size + " " + name] = peers[name].about
                peers[name].steps(WARM[size], self.left())
            except (Left, Failed, OSError) as error:
                self.failed |= not isinstance(error, Left)
                self.note("%s: %s: %s" % (name, "left out" if isinstance(error, Left) else "failed", error))
                if name in peers:
                    peers.pop(name).close()

    def turn_of_trainer(self, size, name, strategy):
        path = os.path.join(self.c.build, "timeline.json")
        plain = size == "124M" and strategy == "none"
        took, text = train(self.c.train(size, strategy, STEPS[size], *(["--timeline", path] if plain else [])), self.left(), self.c.build)
        self.ms.setdefault((size, name), []).append(median_of(took, WARM[size]))
        if not plain:
            return
        with open(path) as file:
            self.timeline = read_timeline(json.load(file)["traceEvents"])
        if read_table(text):
            self.host_ms.append(read_table(text)["host_ms"])

    def turn_of_peer(self, size, name, peer):
        ms = peer.steps(TURN[size], self.left())["ms"]
        self.ms.setdefault((size, name), []).append(statistics.median(ms))

    def rounds_of(self, size, strategies, peers, seconds):
        """Turns of the trainer (by strategy) and of the peers, in an order that is reversed every round.
        seconds: limit of a round."""
        turns = [(self.turn_of_trainer, name, strategy) for name, strategy in strategies]
        turns[1:1] = [(self.turn_of_peer, name, peer) for name, peer in peers.items()]
        for number in range(self.rounds):
            if self.left() < seconds:
                self.note("%s: %d rounds instead of %d: the time is up" % (size, number, self.rounds))
                break
            for entry in list(turns if number % 2 == 0 else reversed(turns)):
                turn, name, what = entry
                if not self.attempt("%s %s" % (size, name), turn, size, name, what):
                    turns.remove(entry)
                elif self.ms.get((size, name)):
                    print("%s %s: %.2f ms per step" % (size, name, self.ms[(size, name)][-1]), flush=True)

    def tune(self, size):
        """Writes the table of a size, and a copy to the results. Without it the programs use cuBLASLt's first choices."""
        text = run(self.c.tune(size), self.left(), self.c.build)
        self.tuned[size] = [json.loads(line) for line in text.splitlines() if line.startswith('{"m"')]
        if self.out and os.path.realpath(self.out) != os.path.realpath(self.c.build):
            shutil.copy(self.c.table(size), self.out)

    def look_inside(self):
        if self.left() < 30:
            self.note("profile: left out: the time is up")
            return
        self.profile = read_profile(run(self.c.train("124M", "none", PROFILED, "--profile"), self.left(), self.c.build))
        if not self.profile:
            self.note("profile: left out: the trainer printed none that could be read")

    def measure_small(self):
        c, peers = self.c, {}
        self.start((c.compile_llmc, c.tokens()))()
        join = self.start(*([words] for words in c.compile), (c.data("124M"), c.data("1.5B")))
        try:
            self.open_peers("124M", [("torch autocast", c.torch("124M", "autocast")), ("torch bf16", c.torch("124M", "bf16"))], peers)  # they compile, too
            join()
            self.attempt("tuner", self.tune, "124M")
            self.attempt("profile", self.look_inside)
            self.open_peers("124M", [("bare", c.bench())], peers)
            self.rounds_of("124M", [("trainer", "none"), ("trainer, ZeRO-3", "full")], peers, 40)
        finally:
            join_quietly(join)
            for peer in peers.values():
                peer.close()

    def measure_large(self):
        peers = {}
        try:
            self.attempt("tuner", self.tune, "1.5B")
            self.open_peers("1.5B", [("torch autocast", self.c.torch("1.5B", "autocast"))], peers)
            self.rounds_of("1.5B", [("trainer", "none")], peers, 45)
        finally:
            for peer in peers.values():
                peer.close()

    def measure(self):
        self.write()
        self.attempt("124M", self.measure_small)
        if self.left() > 90:
            self.attempt("1.5B", self.measure_large)
        else:
            self.note("1.5B: left out: the time is up")

    def ratio(self, size, over, under):
        """Median over rounds of the time of `over` by that of `under`."""
        pairs = list(zip(self.ms.get((size, over), []), self.ms.get((size, under), [])))
        return statistics.median(a / b for a, b in pairs) if pairs else None


def model_flops(size):
    return predict_gpt.rows_of(size, BATCH[size], LENGTH, size == "1.5B")[2]


def profile_table(bench):
    """Kernels with their share of both limits. predict_gpt.py provides bytes that the trainer does not
    count."""
    known = {"norm": "norm of the gradients", "optimizer": "AdamW", "reduce": "gradients to f32, and of wte together"}
    moved = {group: size for group, _, _, size in predict_gpt.rows_of("124M", BATCH["124M"], LENGTH, False)[0]}
    copy = bench.about.get("124M bare", {}).get("copy_gbytes", 0)
    lines = ["| kernel | launches | ms | share | TFLOP/s | share of 989 | GB/s | share of the copy | share of its limit |",
             "|---|---|---|---|---|---|---|---|---|"]
    for name, n, ms, share, tera, giga in bench.profile:
        if name in known and not giga and ms > 0:
            giga = moved[known[name]] / ms * 1e-6
        by_flops, by_bytes = tera * 1e12 / PEAK, giga / copy if copy else 0
        limit = "-"
        if by_flops or by_bytes:
            limit = "%.0f%%, %s" % (100 * max(by_flops, by_bytes), "FLOPs" if by_flops >= by_bytes else "bytes")
        of_copy = "%.0f%%" % (100 * by_bytes) if copy else "-"
        lines.append("| %s | %d | %.3f | %.1f%% | %.0f | %.0f%% | %.0f | %s | %s |"
                     % (name, n, ms, share, tera, 100 * by_flops, giga, of_copy, limit))
    return lines


def attention_line(bench):
    """Attention of one block, forward and backward: the trainer's kernels, and the candidates of PyTorch."""
    took = bench.about.get("124M torch autocast", {}).get("attention_ms", {})
    kernels = [(n, ms) for name, n, ms, _, _, _ in bench.profile if name.startswith("attention")]
    values = ["%s %.3f" % (name, ms) for name, ms in took.items()]
    if kernels:
        values.insert(0, "the trainer %.3f" % (sum(ms for _, ms in kernels) / max(kernels[0][0], 1)))
    if not values:
        return ""
    return "Attention of one block of 124M, forward and backward, ms: %s." % ", ".join(values)


def speed_table(bench):
    lines = ["| model | program | ms per step | tokens/s | MFU | time / trainer's time |", "|---|---|---|---|---|---|"]
    for (size, name), values in bench.ms.items():
        ms, ratio = statistics.median(values), bench.ratio(size, name, "trainer")
        lines.append("| %s, %d x %d | %s | %.2f | %.0f | %.1f%% | %.3f |" % (size, BATCH[size], LENGTH, name, ms, BATCH[size] * LENGTH / ms * 1e3,
                                                                           100 * model_flops(size) / (ms * 1e-3 * PEAK), ratio or float("nan")))
    return lines


def checks(bench):
    """(target, result, reached) of every target that was measured."""
    out = []
    peers = [r for r in (bench.ratio("124M", "torch autocast", "trainer"), bench.ratio("124M", "torch bf16", "trainer")) if r]
    if peers:
        out.append(("124M: tokens/s of the trainer over PyTorch's faster setting, at least 1.00", "%.3f" % min(peers), min(peers) >= 1))
    large = bench.ratio("1.5B", "torch autocast", "trainer")
    if large:
        out.append(("1.5B, recomputing: the same, at least 1.00", "%.3f" % large, large >= 1))
    reducer, shards = bench.ratio("124M", "trainer", "bare"), bench.ratio("124M", "trainer, ZeRO-3", "bare")
    if reducer:
        out.append(("reducer: time over a bare step, at most 1%", "%+.2f%%" % (100 * reducer - 100), reducer <= 1.01))
    if shards:
        out.append(("ZeRO-3 on one rank: time over a bare step, at most 3%", "%+.2f%%" % (100 * shards - 100), shards <= 1.03))
    host, device = bench.timeline.get("host_ms"), bench.timeline.get("device_ms")
    if host:
        share = max(h / d for h, d in zip(host, device))
        out.append(("timeline: the host launches a step in less than half of the device's time", "%.0f%%" % (100 * share), share < 0.5))
        idle = max(i / (i + d) for i, d in zip(bench.timeline["idle_ms"], device))
        out.append(("timeline: the device is idle at most 1% of a step", "%.2f%%" % (100 * idle), idle <= 0.01))
    return out


def torch_version(bench):
    return next((about["torch"] for about in bench.about.values() if "torch" in about), "missing")


def tuned_table(bench, size):
    names = ("none", "bias", "GELU", "gradient of GELU", "bias gradient")
    lines = ["| m, n, k | epilogue | algorithms | first choice | fastest | fastest, separate |", "|---|---|---|---|---|---|"]
    for p in bench.tuned[size]:
        separate = "%.2f" % p["separate_us"] if "separate_us" in p else "-"
        lines.append("| %d, %d, %d | %s | %d | %.2f | %.2f | %s |" % (
            p["m"], p["n"], p["k"], names[p["epilogue"]], p["algorithms"], p["first_us"], p["best_us"], separate))
    return lines


def report(bench):
    """The page as text."""
    device = bench.about.get("124M bare", {})
    lines = []
    if "device" in device:
        about = (device["device"], device.get("copy_gbytes", 0), torch_version(bench))
        lines = ["%s, copy on the device %.0f GB/s, PyTorch %s" % about, ""]
    lines += speed_table(bench) + ["", "| target | measured | |", "|---|---|---|"]
    lines += ["| %s | %s | %s |" % (what, value, "reached" if holds else "**missed**") for what, value, holds in checks(bench)]
    if bench.profile:
        lines += ["", "One step of 124M by kernel, launched one by one, each followed by an event:", ""] + profile_table(bench)
    if attention_line(bench):
        lines += ["", attention_line(bench)]
    for size in bench.tuned:
        lines += ["", "Products of %s, in us. Separate: the epilogue by a kernel of its own." % size, ""] + tuned_table(bench, size)
    if bench.timeline:
        lines += ["", "Three steps of 124M, ms: the host launches them in %s; the device works for %s and is idle for %s."
                  % tuple(", ".join("%.2f" % v for v in bench.timeline[key]) for key in ("host_ms", "device_ms", "idle_ms"))]
    return "\n".join(lines + [""] * bool(bench.notes) + ["- " + note for note in bench.notes]) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.path.join(ROOT, "bench", "results"))
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--programs", default=os.path.join(ROOT, "build", "gpu"),
                        help="folder of the programs; missing ones are built there")
    parser.add_argument("--build", help="folder for data, which is kept; a temporary one by default")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        commands = Commands(args.build or temporary, os.path.abspath(args.programs))
        if args.dry_run:
            print("\n".join(shlex.join(words) for words in commands.all()))
            return 0
        if not has_gpu():
            print("the driver finds no GPU: GPT-2 is left out")
            return 77
        os.makedirs(args.out, exist_ok=True)
        bench = Bench(commands, args.minutes, args.rounds, args.out)
        bench.measure()
        print(bench.write())
        return int(bench.failed)


def has_gpu(library="libcuda.so.1"):
    """Queries the driver: containers may lack nvidia-smi."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


if __name__ == "__main__":
    sys.exit(main())

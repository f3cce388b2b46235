#!/usr/bin/env python3
"""bench/gpu/gpt.py with stand-in programs: turns, medians, ratios, targets, and programs that are missing,
fail or hang.

    bench_gpt_selftest.py ROOT"""
import os
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.abspath(sys.argv.pop(1))
sys.dont_write_bytecode = True  # no files next to the sources
sys.path.insert(0, os.path.join(ROOT, "bench", "gpu"))
import gpt  # noqa: E402
import predict_gpt  # noqa: E402

gpt.STEPS = {"124M": 40, "1.5B": 20}

TRAINER = """
import sys, time
words = sys.argv[1:]
value = lambda flag: words[words.index(flag) + 1]
print("data: 2000000 tokens")
print("validation loss 10.8")
steps = int(value("--steps"))
for step in range(1, steps + 1):
    time.sleep(0.03 if step < 3 else 0.002 if value("--strategy") == "full" else 0.001)
    if step % max(steps // 20, 1) == 0:
        print("step %4d/%d   loss 10.8   1000 tokens/s   gradient norm 1   ETA 0:00" % (step, steps), flush=True)
    if step % max(steps // 10, 1) == 0:
        time.sleep(0.01)
        print("step %4d/%d   validation loss 10.8000   (unigram entropy 7.9726)" % (step, steps), flush=True)
if "--profile" in words:
    print("\\n  step 8 of rank 0, 30.000 ms        launches         ms    share   TFLOP/s      GB/s   of limit")
    print("  %-34s %8d   %8.3f   %5.1f%%   %7.1f   %7.0f   %7.1f%%" % ("mlp up, gelu", 12, 20, 66.7, 700.1, 900, 70.8))
    print("  %-34s %8d   %8.3f   %5.1f%%   %7.1f   %7.0f   %7.1f%%" % ("attention backward", 12, 6, 20.0, 300.0, 1000, 30.0))
    print("  %-34s %8d   %8.3f   %5.1f%%   %7.1f   %7.0f         -\\n" % ("optimizer", 1, 1, 33.3, 0, 0))
if "--timeline" in words:
    import json
    span = lambda name, cat, step, begin, end: {"name": name, "cat": cat, "ph": "X", "ts": step * 30e3 + begin, "dur": end - begin, "args": {"step": step}}
    events = [span(*e) for step in (4, 5, 6) for e in (("pack", "host", step, 0, 900), ("forward unit 0", "host", step, 1000, 1500),
              ("gather unit 0", "host", step, 1200, 1400), ("optimizer", "host", step, 2000, 2500), ("read the step before", "host", step, 2500, 29e3),
              ("forward unit 0", "device", step, 2000, 20e3), ("optimizer", "device", step, 20250, 29e3))]
    events += [span("forward unit 0", cat, 7, 1000, 2000) for cat in ("host", "device")]
    json.dump({"traceEvents": events + [{"name": "process_name", "ph": "M"}]}, open(value("--timeline"), "w"))
print("  ranks   pp   dp   tp   strategy   dtype   tokens/s   TFLOP/s     MFU   host in a step   step")
print("      1    1    1    1   %-8s   bf16      1000000   800.00   80.9%%          1.50 ms   31.00 ms" % value("--strategy"))
"""

TUNER = """
import sys
with open(sys.argv[1], "w") as file:
    file.write("end 0")
print('{"bench_gpt": 1}')
print('{"m": 32768, "n": 768, "k": 3072, "epilogue": 4, "algorithms": 16, "first_us": 210.5, "best_us": 200, "best": 9, "separate": 1, "separate_us": 200}')
"""

PEER = """
import json, sys
print(json.dumps(ABOUT), flush=True)
for line in sys.stdin:
    print(json.dumps({"ms": [9.0] + [MS] * (int(line.split()[1]) - 1), "loss": 1}), flush=True)
"""


class Pretended(gpt.Commands):
    """The same commands, with a Python program instead of each."""

    def __init__(self, build, peers):
        super().__init__(build, build)
        self.peers = peers
        self.compile, self.compile_llmc = [[sys.executable, "-c", ""]], [sys.executable, "-c", ""]
        self.trainer, self.llmc = os.path.join(build, "trainer.py"), os.path.join(build, "llmc.py")
        for path, text in ((self.trainer, TRAINER), (self.llmc, "")):
            with open(path, "w") as file:
                file.write(text)

    def data(self, size):
        return [sys.executable] + super().data(size)

    def tokens(self):
        return [sys.executable] + super().tokens()

    def train(self, *more):
        return [sys.executable] + super().train(*more)

    def tune(self, size):
        return [sys.executable, "-c", self.peers.get("tuner", TUNER), self.table(size)]

    def torch(self, size, precision):
        return [sys.executable, "-c", self.peers[precision]]

    def bench(self, *more):
        return [sys.executable, "-c", self.peers["bare"]]


def peer(ms, **about):
    return PEER.replace("MS", str(ms)).replace("ABOUT", repr(about or {"peer": 1}))


class Tests(unittest.TestCase):
    def bench(self, minutes=5, rounds=2, **peers):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        programs = {"autocast": peer(4.0, torch="2.11", attention_ms={"cudnn": 0.5, "flash": 0.625}), "bf16": peer(3.0),
                    "bare": peer(2.0, device="nobody", copy_gbytes=4000), **peers}
        return gpt.Bench(Pretended(self.folder.name, programs), minutes, rounds, self.folder.name)

    def page(self):
        with open(os.path.join(self.folder.name, "gpt.md")) as file:
            return file.read()

    def test_a_whole_run(self):
        bench = self.bench()
        bench.measure()
        self.assertEqual(bench.notes, [])
        self.assertEqual({key: len(values) for key, values in bench.ms.items()},
                         {("124M", name): 2 for name in ("trainer", "trainer, ZeRO-3", "torch autocast", "torch bf16", "bare")} |
                         {("1.5B", name): 2 for name in ("trainer", "torch autocast")})
        self.assertEqual(bench.ms[("124M", "torch autocast")], [4.0, 4.0])
        self.assertTrue(1 <= min(bench.ms[("124M", "trainer")]) < 100)  # the slow first steps are left out
        self.assertEqual(bench.host_ms, [1.5, 1.5])
        self.assertEqual(bench.profile, [("mlp up, gelu", 12, 20, 66.7, 700.1, 900), ("attention backward", 12, 6, 20.0, 300.0, 1000),
                                         ("optimizer", 1, 1, 33.3, 0, 0)])
        self.assertEqual({key: [round(v, 6) for v in values] for key, values in bench.timeline.items()},
                         {"host_ms": [1.0] * 3, "device_ms": [26.75] * 3, "idle_ms": [0.25] * 3})
        text = gpt.report(bench)
        for line in ("| 124M, 32 x 1024 | torch bf16 | 3.00 | 10922667 |", "nobody, copy on the device 4000 GB/s, PyTorch 2.11\n",
                     "| mlp up, gelu | 12 | 20.000 | 66.7% | 700 | 71% | 900 | 22% | 71%, FLOPs |",
                     "| optimizer | 1 | 1.000 | 33.3% | 0 | 0% | 3733 | 93% | 93%, bytes |",
                     "| 32768, 768, 3072 | bias gradient | 16 | 210.50 | 200.00 | 200.00 |",
                     "forward and backward, ms: the trainer 0.500, cudnn 0.500, flash 0.625.",
                     "device's time | 4% | reached |", "at most 1% of a step | 0.93% | reached |"):
            self.assertIn(line, text)
        self.assertTrue(self.page().endswith(text))

    def test_what_is_required(self):
        bench = self.bench()
        bench.ms = {("124M", "trainer"): [40.0, 20.0, 30.0], ("124M", "torch autocast"): [48.0, 24.0, 36.0], ("124M", "torch bf16"): [44.0, 18.0, 33.0],
                    ("124M", "bare"): [39.8, 19.9, 29.0], ("124M", "trainer, ZeRO-3"): [42.0, 20.3, 30.9]}
        found = {what.split(":")[0]: (value, holds) for what, value, holds in gpt.checks(bench)}
        self.assertEqual(found, {"124M": ("1.100", True), "reducer": ("+0.50%", True), "ZeRO-3 on one rank": ("+5.53%", False)})
        bench.ms[("124M", "torch bf16")] = [36.0, 18.0, 27.0]
        self.assertIn(("0.900", False), [check[1:] for check in gpt.checks(bench)])

    def test_without_pytorch(self):
        gone = "import sys\nprint('PyTorch is not installed: left out', file=sys.stderr)\nsys.exit(77)"
        bench = self.bench(autocast=gone, bf16="raise SystemExit('out of memory')", rounds=1)
        bench.measure()
        self.assertEqual(bench.notes, ["torch autocast: left out: PyTorch is not installed: left out", "torch bf16: failed: %s: status 1: out of memory"
                                       % os.path.basename(sys.executable), "torch autocast: left out: PyTorch is not installed: left out"])
        self.assertEqual(len(bench.ms[("1.5B", "trainer")]), 1)

    def test_tables_of_the_tuner(self):
        """The programs of a size get its table, but no table that was not written."""
        bench = self.bench(tuner="raise SystemExit('no device')")
        self.assertFalse(bench.attempt("tuner", bench.tune, "124M"))
        self.assertNotIn("--gemm-table", bench.c.train("124M", "none", 9) + gpt.Commands.bench(bench.c))
        bench = self.bench()
        self.assertTrue(bench.attempt("tuner", bench.tune, "124M"))
        table = os.path.join(self.folder.name, "gemm_table_124M.txt")
        for words in (bench.c.train("124M", "none", 9), gpt.Commands.bench(bench.c)):
            self.assertEqual(words[words.index("--gemm-table") + 1], table)
        self.assertNotIn("--gemm-table", bench.c.train("1.5B", "none", 9))
        self.assertEqual(gpt.Commands.tune(bench.c, "1.5B")[1:7], ["--tune", table.replace("124M", "1.5B"), "--layers", "1", "--heads", "25"])

    def test_whether_there_is_a_gpu(self):
        self.assertFalse(gpt.has_gpu("libthere_is_no_driver.so.1"))
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        for number, (status, count) in enumerate(((0, 2), (0, 0), (100, 0))):
            path = os.path.join(folder.name, "driver%d.so" % number)
            code = "int cuInit(unsigned f) { (void)f; return %d; }\nint cuDeviceGetCount(int *n) { *n = %d; return 0; }\n" % (status, count)
            subprocess.run([os.environ.get("CC", "cc"), "-x", "c", "-shared", "-fPIC", "-o", path, "-"], input=code, text=True, check=True)
            self.assertEqual(gpt.has_gpu(path), count > 0)

    def test_kernels_that_do_not_compile(self):
        """run.sh then fails with status 1, not 77 for a missing device."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        done = subprocess.run(["sh", os.path.join(ROOT, "bench", "gpu", "run.sh"), "--out", folder.name],
                              env=dict(os.environ, NVCC="false", PROGRAMS_DIR=folder.name), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.assertEqual(done.returncode, 1)

    def test_a_profile_that_cannot_be_read(self):
        bench = self.bench()
        with open(bench.c.trainer, "w") as file:
            file.write("print('all is well')")
        bench.look_inside()
        self.assertEqual(bench.notes, ["profile: left out: the trainer printed none that could be read"])

    def test_a_program_that_hangs(self):
        with self.assertRaisesRegex(gpt.Failed, "killed after 1 s"):
            gpt.Peer([sys.executable, "-c", "import time; time.sleep(60)"], 1)

    def test_a_compiler_that_fails(self):
        bench = self.bench()
        bench.c.compile[0][-1] = "raise SystemExit('there is no sm_90')"
        bench.measure_large = lambda: None
        bench.measure()
        self.assertEqual((bench.ms, bench.failed), ({}, True))
        self.assertIn("status 1: there is no sm_90", self.page())

    def test_a_trainer_that_fails(self):
        """PyTorch and the bare step are measured all the same."""
        bench = self.bench()
        with open(bench.c.trainer, "w") as file:
            file.write("print('GPU 0 of rank 0 is too small')\nraise SystemExit(1)")
        bench.measure()
        self.assertEqual({key: len(values) for key, values in bench.ms.items()},
                         {("124M", name): 2 for name in ("torch autocast", "torch bf16", "bare")} | {("1.5B", "torch autocast"): 2})
        notes = [note.split(": ")[0] for note in bench.notes]
        self.assertEqual((notes, bench.failed), (["profile", "124M trainer", "124M trainer, ZeRO-3", "1.5B trainer"], True))
        self.assertIn("status 1: GPU 0 of rank 0 is too small", self.page())
        with open(bench.c.trainer, "w") as file:
            file.write("print('step 10/39 loss 1')")
        with self.assertRaisesRegex(gpt.Failed, "two progress lines"):
            bench.turn_of_trainer("124M", "trainer", "none")

    def test_a_run_that_is_cut_off(self):
        """The page has all turns up to now."""
        bench = self.bench()
        original, turns = bench.turn_of_trainer, []

        def turn(*arguments):
            turns.append(arguments)
            if len(turns) == 2:
                self.seen = self.page()
            return original(*arguments)

        bench.turn_of_trainer = turn
        bench.measure()
        for words in ("| 124M, 32 x 1024 | trainer |", "torch bf16", "bare", "| mlp up, gelu |"):
            self.assertIn(words, self.seen)
        self.assertNotIn("ZeRO-3 |", self.seen)

    def test_programs_that_were_prepared(self):
        commands = gpt.Commands("/data", "/kit")
        self.assertEqual((commands.trainer, commands.bench()[0]), ("/kit/train_gpt_cuda", "/kit/bench_gpt"))
        self.assertEqual([words[2:] for words in commands.compile], [["programs", "/kit", "train_gpt_cuda"], ["programs", "/kit", "bench_gpt"]])

    def test_the_time_is_up(self):
        bench = self.bench(minutes=0.3, rounds=2)
        bench.measure()
        self.assertEqual(bench.notes, ["profile: left out: the time is up", "124M: 0 rounds instead of 2: the time is up",
                                       "1.5B: left out: the time is up"])
        self.assertEqual(gpt.checks(bench), [])

    def test_steps_that_are_counted(self):
        clock = iter([0.0, 1.0, 1.3, 9.0, 9.2, 9.6, 20.0]).__next__
        lines = ["hello\n", "step    5/99   loss 5\n", "step   10/99   loss 5\n", "step   10/99   validation loss 5\n", "step   15/99   loss 5\n",
                 "step   20/99   loss 5\n", "step   20/99   validation loss 5\n"]
        took, text = gpt.read_progress(lines, clock)
        self.assertEqual({step: round(ms) for step, ms in took.items()}, {10: 60, 20: 80})
        self.assertTrue(text.endswith("step   20/99   validation loss 5\n"))
        self.assertAlmostEqual(gpt.median_of(took, 0), 70)

    def test_prediction(self):
        rows, parameters, flops = predict_gpt.rows_of("124M", 32, 1024, False)
        self.assertEqual(parameters, 124439808)  # what the paper's smallest model has
        products = sum(r[2] for r in rows if "attention" not in r[0])
        self.assertAlmostEqual(products, 6.0 * 32768 * (12 * 12 * 768 * 768 + 50257 * 768))
        self.assertAlmostEqual(flops - products, 6.0 * 12 * 1024 * 768 * 32768)
        again = predict_gpt.rows_of("124M", 32, 1024, True)[0]
        self.assertAlmostEqual(sum(r[2] for r in again if "products, forward" in r[0]) - sum(r[2] for r in rows if "products, forward" in r[0]),
                               2.0 * 32768 * 11 * 8 * 768 * 768)


if __name__ == "__main__":
    unittest.main()

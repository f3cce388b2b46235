#!/usr/bin/env python3
"""bench/scaling.sh with a compiler and a PyTorch that only pretend: medians, efficiencies, commands and errors.

    scaling_selftest.py ROOT"""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.abspath(sys.argv.pop(1))

# Writes a trainer. On n ranks an epoch takes 4.096 / n s, but the first one longer and the last one shorter.
COMPILER = r"""#!/bin/sh
for source in "$@"; do case $source in *.c) break ;; esac; done
grep -q "ddp.h" "$source" || exit 1
while [ $# -gt 0 ]; do [ "$1" != -o ] || out=$2; shift; done
cat >"$out" <<'END'
#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case "$(basename "$0")" in
mlp*) [ "$1" != "${BROKEN:-}" ] || { echo "rank 0: no memory"; exit 1; }
    echo "2 ranks"
    awk -v n="$1" 'BEGIN { for (e = 1; e <= 5; e++) { t += (e == 1 ? 9 : e == 5 ? 0.1 : 4.096 / n); printf "epoch %d/5   loss 1.0   test accuracy 99.00%%   %.6f s\n", e, t } }' ;;
*) shift; printf '\n  ranks   tokens/s   waiting for communication\n  %5d   %8.0f   0.10%% of the time, 0.10%% on the slowest rank\n' "$1" "$((100 * $1))" ;;
esac
END
chmod +x "$out"
"""
# Each run has another speed; three rounds are 900, 1000 and 1100.
PYTHON = r"""#!/bin/sh
[ "$1" != -c ] || exit "${WITHOUT_TORCH:-0}"
shift
echo "torch $*" >>"$CALLS"
run=$(grep -c "^torch $*" "$CALLS")
case $1 in mlp) echo "images/s $((800 + 100 * run))" ;; *) echo "tokens/s 50.0" ;; esac
"""


def table_of(text, name):
    """The rows of a table: {(scaling, ranks): cells}."""
    rows = text.split("| %s |" % name)[1].split("\n\n")[0].split("\n")[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row]
    return {(row[0], row[1]): row[2:] for row in cells}


class Scaling(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        for name, text in (("cc", COMPILER), ("python", PYTHON)):
            with open(self.path(name), "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(self.path(name), 0o755)

    def path(self, name):
        return os.path.join(self.folder, name)

    def read(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            return file.read()

    def run_scaling(self, *arguments, **variables):
        environment = dict(os.environ, CC=self.path("cc"), PYTHON=self.path("python"), CALLS=self.path("calls"),
                           CORES="2", **variables)
        return subprocess.run(["sh", os.path.join(ROOT, "bench", "scaling.sh"), "--out", self.folder, *arguments],
                              env=environment, capture_output=True, text=True, check=False)

    def test_medians_and_efficiencies(self):
        result = self.run_scaling("--rounds", "3")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        text = self.read("scaling.md")
        mlp, gpt = table_of(text, "train_mlp"), table_of(text, "train_gpt")
        self.assertEqual(mlp[("strong", "1")][:3], ["256", "1000 (1000 to 1000)", "100.0%"])
        self.assertEqual(mlp[("strong", "2")], ["256", "2000 (2000 to 2000)", "100.0%", "1000 (900 to 1100)", "50.0%", "2.00"])
        self.assertEqual(mlp[("weak", "4 on 2 cores")],
                         ["1024", "4000 (4000 to 4000)", "200.0%", "1000 (900 to 1100)", "50.0%", "4.00"])
        self.assertEqual(gpt[("strong", "4 on 2 cores")], ["8", "400 (400 to 400)", "200.0%", "50 (50 to 50)", "50.0%", "8.00"])
        self.assertEqual(gpt[("weak", "2")][0], "16")
        self.assertEqual((len(mlp), len(gpt)), (5, 5))
        self.assertRegex(text, r"^2 cores, medians of 3 runs \(lowest to highest\)\. Other programs used \d+% of the cores")
        for line in self.read("scaling.csv").split("\n")[1:-1]:
            self.assertRegex(line, r"^(mlp|gpt),(strong|weak),[124],(ddp|torch),[123],\d+(\.\d+)?,\d+\.\d$")
        self.assertEqual(self.read("scaling.csv").count("\n"), 1 + 3 * 20)
        self.assertIn('"weak, 4 on 2 cores" 200.0 50.0', self.read("scaling.dat"))
        if shutil.which("gnuplot"):
            self.assertIn("scaling: wrote ", result.stdout)
            self.assertIn("PyTorch DDP over Gloo", self.read("scaling.svg"))

    def test_commands(self):
        self.assertEqual(self.run_scaling("--rounds", "1", "--steps", "7").returncode, 0)
        calls = self.read("calls").split("\n")
        for call in ("mlp_4 1", "mlp_4 4", "mlp_8 2", "mlp_16 4", "torch mlp --ranks 4 --batch 256 --count 12",
                     "torch mlp --ranks 4 --batch 1024 --count 12", "torch gpt --ranks 2 --batch 16 --count 7"):
            self.assertEqual(calls.count(call), 1, call)
        self.assertIn("train_gpt --ranks 4 --layers 4 --heads 4 --channels 256 --context 256 --batch 32 --micro-batch 2 "
                      "--steps 7 ", self.read("calls"))

    def test_more_ranks_get_a_larger_strong_batch(self):
        self.assertEqual(self.run_scaling("--rounds", "1", "--ranks", "1 2 4 8").returncode, 0)
        self.assertIn("mlp_8 1\n", self.read("calls"))
        self.assertIn("mlp_64 8\n", self.read("calls"))

    def test_without_pytorch(self):
        result = self.run_scaling("--rounds", "1", WITHOUT_TORCH="1")
        self.assertEqual(result.returncode, 0)
        self.assertIn("has no PyTorch: left out", result.stdout)
        self.assertEqual(table_of(self.read("scaling.md"), "train_gpt")[("strong", "2")],
                         ["8", "200 (200 to 200)", "100.0%", "", "", ""])
        self.assertNotIn("torch", self.read("calls"))

    def test_errors(self):
        result = self.run_scaling("--rounds", "1", BROKEN="2")
        self.assertEqual(result.returncode, 1)
        self.assertIn("rank 0: no memory", result.stderr)
        self.assertIn("scaling: mlp, 2 ranks, ddp: no speed in the output", result.stderr)
        for arguments in (["--fast"], ["--rounds"], ["--rounds", "0"], ["--rounds", "x"], ["--epochs", "1"],
                          ["--ranks", "2"], ["--ranks", "1 3"], ["--ranks", "x"]):
            result = self.run_scaling(*arguments)
            self.assertEqual(result.returncode, 1, arguments)
            self.assertEqual((result.stderr[:9], result.stderr.count("\n")), ("scaling: ", 1), arguments)

    def test_the_table_of_train_gpt(self):
        with open(os.path.join(ROOT, "examples", "gpt", "train_gpt.c"), encoding="utf-8") as file:
            self.assertIn(r"\n  ranks   tokens/s   waiting for communication\n", file.read())


if __name__ == "__main__":
    unittest.main()

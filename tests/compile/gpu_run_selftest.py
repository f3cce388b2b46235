#!/usr/bin/env python3
"""tests/gpu/run.sh with a compiler and programs that only pretend: one that fails, crashes, hangs, prints anything or does not compile leaves the others
alone, the table comes at the end, and results are written as they come.

    gpu_run_selftest.py ROOT"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.abspath(sys.argv.pop(1))

COMPILER = """#!/bin/sh
case " $* " in *" -l${MISSING:-nothing} "*) case "${NVCC_PREPEND_FLAGS:-}" in *" -L"*/found/lib" "*) ;; *) exit 1 ;; esac ;; esac
while [ $# -gt 0 ]; do [ "$1" != -o ] || out=$2; shift; done
name=$(basename "$out")
if [ "$name" = "${BROKEN:-}" ]; then echo "error: no such word"; exit 1; fi
cp "$BODIES/$name" "$out" 2>/dev/null || printf '#!/bin/sh\\necho device of nobody\\n' >"$out"
chmod +x "$out"
"""
SANITIZER = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do case $1 in --tool | --error-exitcode | --report-api-errors) shift ;; esac; shift; done
exec "$@"
"""


class Tests(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = folder.name
        os.makedirs(os.path.join(self.root, "tests", "gpu"))
        os.makedirs(os.path.join(self.root, "bodies"))
        os.makedirs(os.path.join(self.root, "bin"))
        for name in ("run.sh", "libraries.sh"):
            shutil.copy(os.path.join(ROOT, "tests", "gpu", name), os.path.join(self.root, "tests", "gpu"))
        self.write("tests/gpu/test_trainer.sh", "exit 0\n")
        for name, text in (("nvcc", COMPILER), ("cc", COMPILER), ("compute-sanitizer", SANITIZER)):
            self.write("bin/" + name, text)

    def write(self, path, text):
        os.makedirs(os.path.dirname(os.path.join(self.root, path)), exist_ok=True)
        with open(os.path.join(self.root, path), "w") as file:
            file.write(text)
        os.chmod(os.path.join(self.root, path), 0o755)

    def run_it(self, *flags, **variables):
        # no compute-sanitizer of this machine's: a test does without
        path = [d for d in os.environ["PATH"].split(":") if not os.path.exists(os.path.join(d, "compute-sanitizer"))]
        environment = dict(os.environ, PATH=":".join([os.path.join(self.root, "bin"), *path]), BODIES=os.path.join(self.root, "bodies"), **variables)
        environment.pop("NVCC", None)
        environment["CC"] = "cc"
        done = subprocess.run(["sh", "tests/gpu/run.sh", "--out", "results", *flags] if flags[:1] != ("sanitize",) else
                              ["sh", "tests/gpu/run.sh", "sanitize", "--out", "results", *flags[1:]], cwd=self.root, env=environment, timeout=100,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        self.results = {}
        if os.path.exists(os.path.join(self.root, "results", "results.jsonl")):
            with open(os.path.join(self.root, "results", "results.jsonl")) as lines:
                self.results = {line["row"]: line["result"] for line in map(json.loads, lines)}
        return done.returncode, done.stdout

    def rows(self, words):
        return {result for row, result in self.results.items() if words in row}

    def test_all_is_well(self):
        status, text = self.run_it()
        self.assertEqual((status, set(self.results.values())), (0, {"ok"}))
        self.assertIn("0 of 27 rows are not ok", text)
        self.assertIn("device of nobody", text)
        self.assertEqual(sorted(os.listdir(os.path.join(self.root, "results"))), ["log.txt", "results.jsonl", "table.txt"])

    def test_what_goes_wrong_stays_alone(self):
        self.write("bodies/test_groups", "#!/bin/sh\necho 'groups: 3 is not 4'\nexit 1\n")
        self.write("bodies/test_fsdp", "#!/bin/sh\nkill -SEGV $$\n")
        self.write("bodies/test_tensor", "#!/bin/sh\n[ $1 = threads ] || exit 0\ntrap '' TERM\nwhile :; do sleep 0.1; done\n")
        self.write("bodies/test_pipeline", "#!/bin/sh\nhead -c 300000 /dev/urandom\nexit 3\n")
        self.write("bodies/test_attention", "#!/bin/sh\nexit 77\n")
        status, text = self.run_it(BROKEN="test_layers", ROW_SECONDS="4")
        self.assertEqual(status, 1)
        self.assertEqual(self.rows("messages"), {"FAILED (1)"})
        self.assertEqual(self.rows("sharded training, "), {"FAILED (139)"})
        self.assertEqual(self.rows("tensors"), {"HUNG, 137", "ok"})
        self.assertEqual(self.rows("pipelines"), {"FAILED (3)"})
        self.assertEqual(self.rows("layers, "), {"NOT BUILT"})
        self.assertEqual(self.rows("attention"), {"FAILED (77)"})
        self.assertEqual(self.rows("GPT") | self.rows("collectives") | self.rows("kernels"), {"ok"})
        self.assertEqual(len(self.results), 27)
        self.assertLess(len(text), 12000 + 4000)
        table = text[-4000:]
        for words in ("kernels against references", "NOT BUILT", "HUNG, 137", "of 27 rows are not ok"):
            self.assertIn(words, table)
        self.assertIn("groups: 3 is not 4", text)
        self.assertIn("no such word", text)

    def test_no_device(self):
        self.write("bodies/test_kernels", "#!/bin/sh\necho there is no device\nexit 77\n")
        status, text = self.run_it()
        self.assertEqual(status, 77)
        self.assertIn("there is no device", text)

    def test_ranks_of_nccl_on_one_gpu(self):
        self.write("bodies/test_training", "#!/bin/sh\necho shares ${NCCL_MULTI_RANK_GPU_ENABLE:-nothing} by ${DDP_TEST_ENGINE:-itself}\n")
        self.run_it("--only", "on one GPU; processes$")
        with open(os.path.join(self.root, "build", "gpu", "training_shared2.log")) as log:
            self.assertEqual((self.results["NCCL: training, 2 ranks on one GPU; processes"], log.read()), ("ok", "shares 1 by nccl\n"))
        self.write("bodies/nccl", "#!/bin/sh\n! grep -q 23000 $0.cu\n")  # the program that asks NCCL's version, beside its source
        status, text = self.run_it()
        self.assertEqual((status, len(self.results)), (0, 24))
        self.assertIn("NCCL is older than 2.30", text)

    def test_libraries_of_pytorch(self):
        for path in ("nccl/lib/libnccl.so.2", "nccl/include/nccl.h", "other/lib/libnccl.so.1"):
            self.write("packages/nvidia/" + path, "")
        status, text = self.run_it("--only", "^NCCL: layers", MISSING="nccl", PYTHONPATH=os.path.join(self.root, "packages"))
        self.assertEqual((status, set(self.results.values())), (0, {"ok"}))
        self.assertIn("nvidia/nccl/lib/libnccl.so.2 are PyTorch's", text)
        self.assertEqual(os.listdir(os.path.join(self.root, "build/gpu/found/include")), ["nccl.h"])

    def test_libraries_that_are_not_there(self):
        self.write("bodies/nccl", "#!/bin/sh\nexit 127\n")  # it links, and does not start
        status, text = self.run_it("--only", "^layers", PYTHONPATH="", PYTHON="false")
        self.assertEqual((status, set(self.results.values())), (0, {"ok"}))
        self.assertIn("NCCL is not installed", text)
        self.assertIn("without NCCL", text)

    def test_the_time_is_up(self):
        status, _ = self.run_it("--seconds", "0")
        self.assertEqual((status, set(self.results.values())), (1, {"NOT RUN, late"}))

    def test_some_rows(self):
        self.assertEqual(self.run_it("--only", "^layers")[0], 0)
        self.assertEqual(len(self.results), 2)
        status, text = self.run_it("--only", "^none of them")
        self.assertEqual(status, 1)
        self.assertIn("no row has", text)

    def test_sanitize(self):
        self.write("bodies/test_training", "#!/bin/sh\nexit 2\n")
        status, text = self.run_it("sanitize")
        self.assertEqual(status, 1)
        self.assertEqual(self.rows("memcheck: training"), {"FAILED (2)"})
        self.assertIn("4 of 27 rows are not ok", text)

    def test_no_sanitizer(self):
        os.unlink(os.path.join(self.root, "bin", "compute-sanitizer"))
        status, text = self.run_it("sanitize")
        self.assertEqual((status, self.results, text.count("\n")), (1, {}, 1))
        self.assertIn("there is no compute-sanitizer", text)
        status, text = self.run_it()
        self.assertEqual((status, set(self.results.values()), len(self.results)), (0, {"ok"}, 25))
        self.assertRegex(text, "kernels under compute-sanitizer +not there")
        self.assertIn("0 of 25 rows are not ok", text)
        self.assertIn("without compute-sanitizer", text)

    def test_a_limit_that_is_none(self):
        for limit in ("soon", ""):
            status, text = self.run_it("--seconds", limit)
            self.assertEqual((status, self.results), (1, {}))
            self.assertIn("--seconds N", text)


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""tests/gpu/run.sh with a compiler and programs that only pretend.

A row that fails, crashes, hangs or does not compile leaves the other rows alone. The summary is complete at any
moment. Programs that were prepared are used, and the architecture is the right one.

    gpu_run_selftest.py ROOT"""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = os.path.abspath(sys.argv.pop(1))

# Writes the program that $BODIES has under the name of the output, or one that succeeds. $CALLS lists all calls.
COMPILER = """#!/bin/sh
echo "$*" >>"$CALLS"
case " $* " in
*" -l${MISSING:-nothing} "*) case "${NVCC_PREPEND_FLAGS:-}" in *" -L"*/lib" "*) ;; *) exit 1 ;; esac ;;
esac
while [ $# -gt 0 ]; do [ "$1" != -o ] || out=$2; shift; done
name=$(basename "$out")
if [ "$name" = "${BROKEN:-}" ]; then echo "error: unknown type"; exit 1; fi
cp "$BODIES/$name" "$out" 2>/dev/null || printf '#!/bin/sh\\necho device of nobody\\n' >"$out"
chmod +x "$out"
"""
SANITIZER = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do
    case $1 in --tool | --error-exitcode | --report-api-errors) shift ;; esac
    shift
done
exec "$@"
"""
DEVICE = "#!/bin/sh\necho 'device: nobody, sm_90'\necho 'NCCL: version %d, header 23000'\n"
ROWS, SANITIZE_ROWS = 35, 23
HIDDEN = ("compute-sanitizer", "nvidia-smi", "nvcc")  # of the machine that runs this test


class Tests(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = folder.name
        for name in ("run.sh", "libraries.sh", "compile.sh", "slim_nccl.sh"):
            self.write("tests/gpu/" + name, "")
            shutil.copy(os.path.join(ROOT, "tests", "gpu", name), self.path("tests", "gpu"))
        self.write("tests/gpu/test_trainer.sh", "exit 0\n")
        self.write("tests/gpu/test_mlp.sh", "exit 0\n")
        self.write("bodies/test_device", DEVICE % 23000)
        self.write("calls", "")
        for name, text in (("nvcc", COMPILER), ("cc", COMPILER), ("compute-sanitizer", SANITIZER)):
            self.write("bin/" + name, text)

    def path(self, *names):
        return os.path.join(self.root, *names)

    def write(self, path, text):
        os.makedirs(os.path.dirname(self.path(path)), exist_ok=True)
        with open(self.path(path), "w") as file:
            file.write(text)
        os.chmod(self.path(path), 0o755)

    def read(self, path):
        with open(self.path(path), errors="replace") as file:
            return file.read()

    def environment(self, variables):
        folders = [self.path("bin")]
        for folder in os.environ["PATH"].split(":"):
            if not any(os.path.exists(os.path.join(folder, name)) for name in HIDDEN):
                folders.append(folder)
        environment = dict(os.environ, PATH=":".join(folders), BODIES=self.path("bodies"), CALLS=self.path("calls"),
                           CC="cc", JOBS="4")
        for name in ("NVCC", "ARCH"):
            environment.pop(name, None)
        return dict(environment, **variables)

    def run_it(self, *words, **variables):
        if words[:1] in ((), ("--only",), ("--seconds",), ("--nccl",)):
            words = ("--out", "results", *words)
        elif words[0] in ("sanitize", "shared"):
            words = (words[0], "--out", "results", *words[1:])
        done = subprocess.run(["sh", "tests/gpu/run.sh", *words], cwd=self.root,
                              env=self.environment(variables), timeout=100, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        self.results = {}
        if os.path.exists(self.path("results", "results.jsonl")):
            lines = map(json.loads, self.read("results/results.jsonl").splitlines())
            self.results = {line["row"]: line["result"] for line in lines}
        return done.returncode, done.stdout

    def wait_for(self, words):
        """Until a row has printed these words."""
        deadline = time.time() + 60
        path = "results/running.log"
        while not os.path.exists(self.path(path)) or words not in self.read(path):
            self.assertLess(time.time(), deadline)
            time.sleep(0.05)

    def rows(self, start):
        return {result for row, result in self.results.items() if row.startswith(start)}

    def compiled(self):
        """Names of what was compiled since the last call; probes for libraries are left out."""
        names = re.findall(r"-o \S*/(\w+)$", self.read("calls"), re.M)
        self.write("calls", "")
        return {name for name in names if name not in ("nccl", "cublasLt")}

    #== rows ==

    def test_all_is_well(self):
        status, text = self.run_it()
        self.assertEqual((status, set(self.results.values())), (0, {"ok"}))
        self.assertIn("%d of %d rows have run, 0 of them are not ok" % (ROWS, ROWS), text)
        self.assertIn("device: nobody", text)
        self.assertEqual(set(os.listdir(self.path("results"))), {"log.txt", "results.jsonl", "summary.txt"})
        self.assertLess(len(self.read("results/summary.txt").splitlines()), 60)
        self.assertEqual(list(self.results)[:4], ["device", "kernels", "attention", "nccl.collectives"])

    def test_a_row_that_fails_leaves_the_others_alone(self):
        self.write("bodies/test_groups", "#!/bin/sh\necho 'groups: 3 is not 4'\nexit 1\n")
        self.write("bodies/test_fsdp", "#!/bin/sh\nkill -SEGV $$\n")
        deaf = "#!/bin/sh\n[ $1 = threads ] || exit 0\ntrap '' TERM\nwhile :; do sleep 0.1; done\n"
        self.write("bodies/test_tensor", deaf)
        self.write("bodies/test_pipeline", "#!/bin/sh\nhead -c 300000 /dev/urandom\nexit 3\n")
        self.write("bodies/test_attention", "#!/bin/sh\nexit 77\n")
        status, text = self.run_it(BROKEN="test_layers", ROW_SECONDS="4")
        self.assertEqual(status, 1)
        self.assertEqual(self.rows("groups"), {"FAILED (1)"})
        self.assertEqual(self.rows("fsdp"), {"FAILED (139)"})
        self.assertEqual(self.results["tensor.threads"], "HUNG, 137")
        self.assertEqual(self.results["tensor.processes"], "ok")
        self.assertEqual(self.rows("pipeline"), {"FAILED (3)"})
        self.assertEqual(self.rows("layers"), {"NOT BUILT"})
        self.assertEqual(self.rows("attention"), {"FAILED (77)"})
        self.assertEqual(self.rows("gpt") | self.rows("collectives") | self.rows("kernels"), {"ok"})
        self.assertEqual(len(self.results), ROWS)
        summary = self.read("results/summary.txt")
        for words in ("NOT BUILT", "HUNG, 137", "groups: 3 is not 4"):
            self.assertIn(words, summary)
            self.assertIn(words, text)
        self.assertIn("error: unknown type", text)
        self.assertIn("error: unknown type", self.read("results/log.txt"))
        again = re.search(r"--only '(.*)'", summary).group(1)
        self.run_it("--only", again, ROW_SECONDS="4")
        self.assertNotIn("kernels", self.results)
        self.assertEqual(self.results["attention"], "FAILED (77)")
        self.assertEqual(self.results["layers.threads"], "ok")  # it compiles now

    def test_a_row_that_hangs_does_not_cost_the_next_its_turn(self):
        self.write("bodies/test_kernels", "#!/bin/sh\nsleep 60\n")
        self.run_it("programs", "build/gpu", "test_device", "test_kernels", "test_attention", "test_gpt")
        self.run_it("--only", "^(kernels|attention|gpt.one):", "--seconds", "12", KEPT_SECONDS="3")
        expected = {"device": "ok", "kernels": "HUNG, 124", "attention": "ok", "gpt.one": "ok"}
        self.assertEqual(self.results, expected)

    def test_a_program_that_cannot_be_killed(self):
        real = shutil.which("timeout")
        stuck = '#!/bin/sh\ncase $* in "-k 2 "*gpu/test_kernels) exec sleep 20 ;; esac\nexec %s "$@"\n'
        self.write("bin/timeout", stuck % real)
        self.run_it("--only", "^(kernels|attention):", ROW_SECONDS="3")
        self.assertEqual(self.results, {"device": "ok", "kernels": "STUCK", "attention": "ok"})

    def test_a_run_that_is_killed(self):
        self.write("bodies/test_conformance", "#!/bin/sh\necho 'collectives have begun'\nsleep 60\n")
        script = ["sh", "tests/gpu/run.sh", "--out", "results"]
        program = subprocess.Popen(script, cwd=self.root, env=self.environment({}), stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, start_new_session=True)
        self.wait_for("collectives have begun")
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        lines = self.read("results/summary.txt").splitlines()
        self.assertIn("running nccl.collectives, row 4 of %d" % ROWS, lines[0])
        self.assertIn("device: nobody, sm_90", lines)
        rows = [line.split()[:2] for line in lines if re.match(r"[a-z0-9.]+ +(ok|-) ", line)]
        self.assertEqual(len(rows), ROWS)
        self.assertEqual(rows[:3], [["device", "ok"], ["kernels", "ok"], ["attention", "ok"]])
        self.assertEqual(rows[3:5], [["nccl.collectives", "-"], ["nccl.training", "-"]])
        self.assertIn("=== attention: attention against the CPU: ok", self.read("results/log.txt"))

    def test_a_run_that_is_stopped(self):
        self.write("bodies/test_attention", "#!/bin/sh\necho begun\nexec sleep 60\n")
        program = subprocess.Popen(["sh", "tests/gpu/run.sh", "--out", "results"], cwd=self.root,
                                   env=self.environment({}), stdout=subprocess.PIPE, text=True)
        self.wait_for("begun")
        program.terminate()
        text = program.communicate(timeout=20)[0]
        self.assertEqual(program.returncode, 143)
        self.assertIn("2 of %d rows have run, 0 of them are not ok" % ROWS, text)
        self.assertIn("stopped", self.read("results/summary.txt").splitlines()[0])

    def test_no_device(self):
        self.write("bodies/test_device", "#!/bin/sh\necho there is no device\nexit 77\n")
        status, text = self.run_it()
        self.assertEqual(status, 77)
        self.assertIn("there is no device", text)

    def test_no_time_is_left(self):
        status, _ = self.run_it("--seconds", "0")
        self.assertEqual((status, self.results["device"], self.rows("nccl.")), (1, "NOT RUN", {"NOT RUN"}))
        self.assertEqual(len(self.results), ROWS)

    def test_some_rows(self):
        self.assertEqual(self.run_it("--only", "^layers")[0], 0)
        self.assertEqual(set(self.results), {"device", "layers.threads", "layers.processes"})
        self.assertEqual(self.compiled(), {"test_device", "test_layers"})
        status, text = self.run_it("--only", "^none of them")
        self.assertEqual(status, 1)
        self.assertIn("no row matches", text)

    def test_wrong_limits(self):
        for limit in ("soon", ""):
            status, text = self.run_it("--seconds", limit)
            self.assertEqual((status, self.results), (1, {}))
            self.assertIn("--seconds N", text)

    #== sanitizers ==

    def test_sanitize(self):
        self.write("bodies/test_training", "#!/bin/sh\nexit 2\n")
        status, text = self.run_it("sanitize")
        self.assertEqual(status, 1)
        self.assertEqual(self.rows("memcheck.training"), {"FAILED (2)"})
        self.assertIn("%d of %d rows have run, 3 of them are not ok" % (SANITIZE_ROWS, SANITIZE_ROWS), text)

    def test_no_sanitizer(self):
        os.unlink(self.path("bin", "compute-sanitizer"))
        status, text = self.run_it("sanitize")
        self.assertEqual((status, self.results, text.count("\n")), (1, {}, 1))
        self.assertIn("compute-sanitizer is missing", text)
        status, text = self.run_it()
        self.assertEqual((status, self.results["racecheck.kernels"], len(self.results)), (0, "skipped", ROWS))
        self.assertIn("without compute-sanitizer", text)

    #== libraries ==

    def test_ranks_of_nccl_on_one_gpu(self):
        words = "shares ${NCCL_MULTI_RANK_GPU_ENABLE:-nothing} by ${DDP_TEST_ENGINE:-itself}"
        self.write("bodies/test_training", "#!/bin/sh\necho %s\n" % words)
        self.run_it("--only", "^nccl2.training")
        self.assertEqual(self.results["nccl2.training"], "ok")
        self.assertIn("shares 1 by nccl\n", self.read("results/log.txt"))
        self.write("bodies/test_device", DEVICE % 22809)
        self.write("build/gpu/test_device", DEVICE % 22809)
        status, text = self.run_it()
        self.assertEqual((status, self.rows("nccl2"), self.rows("nccl.")), (0, {"skipped"}, {"ok"}))
        self.assertIn("NCCL is older than 2.30", text)

    def test_shared(self):
        """Only ranks that share the GPU through NCCL, with a slim library. Without one they fail."""
        self.write("bodies/test_groups", "#!/bin/sh\necho $LD_LIBRARY_PATH $NCCL_ALGO; echo not run: this: that\n")
        self.write("build/gpu/nccl/libnccl.so.2", "")
        status, text = self.run_it("shared", "--only", "^nccl2.groups")
        self.assertEqual((status, self.results), (0, {"device": "ok", "nccl2.groups": "ok"}), text)
        self.assertIn("\n    not run: this: that\n", text)
        self.assertIn("\n    not run: this: that\n", self.read("results/summary.txt"))
        self.assertRegex(self.read("results/log.txt"), r"(?m)^%s\S* Ring$" % self.path("build/gpu/nccl"))
        os.renames(self.path("build/gpu/nccl"), self.path("elsewhere"))
        self.assertEqual(self.run_it("--nccl", "elsewhere", "--only", "^nccl2.groups")[0], 0)
        self.assertRegex(self.read("results/log.txt"), r"(?m)^%s\S* Ring$" % self.path("elsewhere"))
        status, text = self.run_it("--nccl", "missing")
        self.assertEqual(status, 1)
        self.assertIn("libnccl.so.2 is missing; sh tests/gpu/slim_nccl.sh builds one", text)
        self.write("build/gpu/test_device", DEVICE % 22809)
        status, text = self.run_it("shared")
        self.assertEqual((status, self.rows("nccl2."), len(self.results)), (1, {"NOT RUN"}, 7), text)
        self.assertIn("NCCL is older than 2.30", text)

    def test_slim_nccl(self):
        """The script that builds it, with sources and a compiler that only pretend."""
        shutil.copy(os.path.join(ROOT, "ddp_cuda.cuh"), self.root)
        functions = set(re.findall(r"\bnccl[A-Z][A-Za-z]*(?=\()", self.read("ddp_cuda.cuh")))
        self.assertIn("ncclCommWindowRegister", functions)
        for path in ("sources/src/device/generate.py", "include/cuda.h", "include/nccl.h", "include/nccl_device/core.h"):
            self.write(path, "")
        self.write("sources/makefiles/version.mk", "NCCL_MAJOR   := 2\nNCCL_MINOR   := 30\n")
        self.write("sources/Makefile", "src.lib:\n\tmkdir -p $(BUILDDIR)/lib\n"
                   "\techo '$(NVCC_GENCODE)' '$(ONLY_FUNCS)' >$(BUILDDIR)/../options\n"
                   "\tls $(CUDA_INC) >>$(BUILDDIR)/../options\n"
                   "\tgcc -shared -fPIC nccl.c -o $(BUILDDIR)/lib/libnccl.so.2.30.0\n")

        def build(version, names, **variables):
            code = "".join("void %s(void) {}\n" % name for name in sorted(names - {"ncclGetVersion"}))
            self.write("sources/nccl.c", code + "int ncclGetVersion(int *v) { *v = %d; return 0; }\n" % version)
            done = subprocess.run(["sh", "tests/gpu/slim_nccl.sh", "sources", "out"], cwd=self.root, text=True,
                                  env=self.environment(dict(variables, CC="gcc", CUDA_HOME=self.root)), stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT)
            return done.returncode, done.stdout

        status, text = build(23007, functions)
        self.assertEqual(status, 0, text)
        self.assertIn("version 23007, 1 MiB, %d functions" % len(functions), text)
        self.assertEqual(set(os.listdir(self.path("out"))), {"libnccl.so.2", "options", "build.log"})
        self.assertRegex(self.read("out/options"), r"^-gencode=arch=compute_90,code=sm_90 \(SendRecv\|.*\ncuda.h\n$")
        for expected, arguments, variables in (
                ("lacks functions of NCCL that ddp_cuda.cuh calls: ncclSend", (23007, functions - {"ncclSend"}), {}),
                ("has version 22999; ranks share", (22999, functions), {}),
                ("has 1 MiB, more than 0", (23007, functions), {"NCCL_MIB": "0"}),
                ("NCCL does not compile; ", (23007, functions | {"an error"}), {}),
                ("nvcc is missing", (23007, functions), {"NVCC": "none"})):
            status, text = build(*arguments, **variables)
            self.assertEqual(status, 1)
            self.assertIn(expected, text)
        self.write("sources/makefiles/version.mk", "NCCL_MAJOR   := 2\nNCCL_MINOR   := 29\n")
        self.assertIn("has version 2.29; ranks share a GPU from 2.30 on", build(23007, functions)[1])
        os.unlink(self.path("sources/makefiles/version.mk"))
        self.assertIn("does not hold the sources of NCCL", build(23007, functions)[1])

    def test_libraries_of_pytorch(self):
        for path in ("nccl/lib/libnccl.so.2", "nccl/include/nccl.h", "other/lib/libnccl.so.1"):
            self.write("packages/nvidia/" + path, "")
        status, text = self.run_it("--only", "^nccl.layers", MISSING="nccl", PYTHONPATH=self.path("packages"))
        self.assertEqual((status, set(self.results.values())), (0, {"ok"}))
        self.assertIn("nvidia/nccl/lib/libnccl.so.2 of PyTorch", text)

    def test_libraries_of_pytorch_for_prepared_programs(self):
        """A program that was linked elsewhere finds libnccl.so.2 by LD_LIBRARY_PATH."""
        self.write("bodies/test_training", "#!/bin/sh\necho path=$LD_LIBRARY_PATH\n")
        self.assertEqual(self.run_it("prepare")[0], 0)
        self.compiled()
        self.write("packages/nvidia/nccl/lib/libnccl.so.2", "")
        ldd = '#!/bin/sh\ncase ${LD_LIBRARY_PATH:-} in *nvidia/nccl/lib*) ;; *) echo "	%s => not found" ;; esac\n'
        self.write("bin/ldd", ldd % "libnccl.so.2")
        status, text = self.run_it("--only", "^nccl.training", PYTHONPATH=self.path("packages"), NVCC="none",
                                   LD_LIBRARY_PATH="/before")
        self.assertEqual((status, self.results), (0, {"device": "ok", "nccl.training": "ok"}))
        self.assertIn("path=%s:/before" % self.path("packages/nvidia/nccl/lib"), self.read("results/log.txt"))

    def test_missing_libraries(self):
        self.write("bodies/nccl", "#!/bin/sh\nexit 127\n")  # it links, and does not start
        self.write("bodies/cublasLt", "#!/bin/sh\nexit 127\n")
        status, text = self.run_it(PYTHONPATH="", PYTHON="false")
        self.assertEqual((status, set(self.results.values())), (0, {"ok", "skipped"}))
        self.assertIn("NCCL is missing: building with DDP_NO_NCCL", text)
        skipped = {row for row, result in self.results.items() if result == "skipped"}
        self.assertEqual({row.split(".")[0] for row in skipped}, {"nccl", "nccl2", "gpt", "trainer", "mlp"})

    #== prepared programs ==

    def test_prepare(self):
        subprocess.run(["git", "init", "-q", self.root], check=True)
        self.write(".gitignore", "/build/\n")
        self.write("large", "x" * (3 << 20))
        status, text = self.run_it("prepare")
        self.assertEqual(status, 0, text)
        names = {"test_device", "test_kernels", "test_kernels_small", "test_gpt", "train_gpt_cuda", "train_gpt",
                 "train_mlp_cuda", "bench_gpu", "bench_gpt", "llmc"}
        for name in names:
            self.assertRegex(text, r"(?m)^%s +0.0 MiB" % name)
        self.assertIn("\ncarry build/gpu: 0.0 MiB\n", text)
        self.assertRegex(text, r"with the working tree, 3.\d MiB, it is 3.\d MiB of 64 MiB")
        calls = self.read("calls")
        self.assertTrue(names <= self.compiled())
        for line in calls.splitlines():
            if "tests/gpu/test_" in line:
                for flag in ("-gencode arch=compute_90,code=sm_90 ", " -O2 ", " -Xlinker -s "):
                    self.assertIn(flag, line)
        status, text = self.run_it("prepare", KIT_MIB="2")
        self.assertEqual((status, self.compiled()), (1, set()))  # all is up to date
        self.assertIn("too large to carry", text)

    def test_prepare_with_a_program_that_does_not_compile(self):
        status, text = self.run_it("prepare", BROKEN="test_groups")
        self.assertEqual(status, 1)
        self.assertIn("tests/gpu/test_groups.cu does not compile", text)
        self.assertRegex(text, "(?m)^test_tensor +0.0 MiB")

    def test_a_compiler_that_hangs(self):
        self.write("bin/nvcc", COMPILER.replace("cp ", '[ "$name" != test_groups ] || sleep 60\ncp ', 1))
        status, text = self.run_it("prepare", COMPILE_SECONDS="2")
        self.assertEqual(status, 1)
        self.assertIn("tests/gpu/test_groups.cu: stopped after 2 s", text)
        self.assertRegex(text, "(?m)^test_tensor +0.0 MiB")

    def test_prepared_programs_are_used(self):
        for name in ("test_kernels", "test_layers"):
            self.write("tests/gpu/%s.cu" % name, "first")
        self.assertEqual(self.run_it("prepare")[0], 0)
        self.compiled()
        os.chmod(self.path("build", "gpu", "test_kernels"), 0o644)  # as some copies are
        status, text = self.run_it(NVCC="none")
        self.assertEqual((status, set(self.results.values())), (0, {"ok"}), text)
        os.unlink(self.path("build", "gpu", "test_attention"))  # missing
        self.write("tests/gpu/test_layers.cu", "second")        # out of date
        status, text = self.run_it()
        self.assertEqual((status, self.compiled()), (0, {"test_attention", "test_layers"}), text)
        self.write("tests/gpu/test_layers.cu", "third")
        status, text = self.run_it("--only", "^kernels")        # does not need test_layers
        self.assertEqual((status, self.compiled()), (0, set()))
        status, text = self.run_it(NVCC="none")
        self.assertEqual((status, self.rows("layers"), self.rows("kernels")), (1, {"ok"}, {"ok"}))
        self.assertIn("nvcc is missing", text)

    def test_programs(self):
        self.assertEqual(self.run_it("programs", "build/gpu", "bench_gpu", "llmc")[0], 0)
        self.assertEqual(self.compiled(), {"bench_gpu", "llmc"})
        self.assertEqual(self.run_it("programs", "build/gpu", "bench_gpu", "llmc")[0], 0)
        self.assertEqual(self.compiled(), set())

    def test_architecture(self):
        smi = "#!/bin/sh\ncase $1 in -L) exit %d ;; *) echo %s ;; esac\n"
        cases = ((None, {}, "code=sm_90"), ((9, "9.0"), {}, "code=sm_90"), ((0, "9.0"), {}, "-arch=native"),
                 ((0, "9.0"), {"ARCH": "sm_80"}, "code=sm_80"))
        for answer, variables, flag in cases:
            if answer:
                self.write("bin/nvidia-smi", smi % answer)
            shutil.rmtree(self.path("build"), ignore_errors=True)
            self.run_it("--only", "^kernels", **variables)
            line = [line for line in self.read("calls").splitlines() if line.endswith("/test_kernels")][-1]
            self.assertIn(flag, line)
            self.compiled()

    def test_prepared_for_another_device(self):
        self.assertEqual(self.run_it("prepare")[0], 0)
        self.compiled()
        for capability, built in (("9.0", set()), ("8.0", {"test_device", "test_kernels"})):
            self.write("bin/nvidia-smi", "#!/bin/sh\ncase $1 in -L) ;; *) echo %s ;; esac\n" % capability)
            self.assertEqual(self.run_it("--only", "^kernels")[0], 0)
            self.assertEqual(self.compiled(), built)

    def test_build(self):
        status, text = self.run_it("build")
        self.assertEqual(status, 0, text)
        self.assertTrue({"test_device", "test_training", "bench_gpu", "bench_gpt"} <= self.compiled())
        status, text = self.run_it("build", "elsewhere", BROKEN="test_training")
        self.assertEqual(status, 1)
        self.assertIn("tests/gpu/test_training.cu does not compile", text)


if __name__ == "__main__":
    unittest.main()

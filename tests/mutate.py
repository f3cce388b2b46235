#!/usr/bin/env python3
"""Puts small faults into the headers, one at a time, and reports whether the tests notice them.

    python3 tests/mutate.py                   every fault of tests/mutants/; the score is the last line
    python3 tests/mutate.py --only PATTERN    faults whose line or header matches the regular expression
    python3 tests/mutate.py --list            print the faults, run nothing
    python3 tests/mutate.py --check           only check that each text occurs once (the test compile.mutants)
    --jobs N       faults at a time; 1 by default
    --build DIR    build/mutate by default
    --patience N   a test gets 20 s and N times as long as without a fault; 5 by default
    --all-tests    also run the other tests of a fault after one has noticed it

tests/mutants/NAME.txt holds the faults of NAME.h or NAME.cuh, one per line, in the order of the header. A
header of examples/extras has tests that include it directly. A line:

    old text @@ new text @@ tests @@ what the fault is

    old text   occurs exactly once in the header, in its bodies. U+23CE represents a line break and indent.
    new text   replaces it; empty drops it.
    tests      separated by commas, fastest first; empty: those of the last line `tests: ...` above.
               unit/core               tests/unit/test_core.c
               ranks/p2p threads 3     with two arguments; a last one NAME=value is the variable DDP_TEST_NAME
               cuda/fsdp threads 2     on the fake GPU (support/cuda_tests.cu)
               asan:unit/core          built with AddressSanitizer and UBSan
               mpi:ranks/p2p 4by2 mpi  over MPI: 4 ranks, 2 per machine
    # begins a comment. ~ begins a known survivor: it counts as not noticed, and does not fail the run.

The checkout is never changed: each worker has a copy of headers, tests and examples below the build
directory. A fault compiles again only what contains the bodies of its header. Without a fault every test
must pass; this runs first. A test notices a fault when it fails, crashes or hangs, and passes without the
fault directly afterwards. A fault that does not compile is an error of the list.

Exit status: 0 when all faults but the known survivors are noticed, 1 when one survives, 2 for an error of
the list or of the tests themselves."""

import argparse
import collections
import fcntl
import hashlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MUTANTS = os.path.join(ROOT, "tests", "mutants")
HEADERS = ["ddp.h", "ddp_fsdp.h", "ddp_pipeline.h", "ddp_tensor.h", "ddp_cuda.cuh"]
EXTRAS = ["examples/extras/npy.h", "examples/gpt/gpt.h"]  # all static: compiled into each test that includes them
BODIES_EXCLUDED = ["-DDDP_IMPLEMENTATION_INCLUDED", "-DDDP_FSDP_IMPLEMENTATION_INCLUDED"]
SIBLINGS_EXCLUDED = ["-DDDP_PIPELINE_IMPLEMENTATION_INCLUDED", "-DDDP_TENSOR_IMPLEMENTATION_INCLUDED"]
ASAN = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all",
        "-fno-sanitize=null,alignment,object-size,pointer-overflow", "-g1"]
ENVIRONMENT = {"ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1:protect_shadow_gap=0",
               "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}

Mutant = collections.namedtuple("Mutant", "header line old new tests what known")
Test = collections.namedtuple("Test", "flavour name arguments")


class ListError(Exception):
    """The list of faults, a test without a fault, or the machine is at fault: no score."""


# == the list =========================================================================================


def parse_test(text):
    flavour, _, rest = text.rpartition(":")
    words = rest.split()
    return Test(flavour or "plain", words[0], tuple(words[1:]))


def read_list(path, header):
    usual = ""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            text = line.strip()
            if text.startswith("tests:"):
                usual = text[6:].strip()
                continue
            if not text or text.startswith("#"):
                continue
            known = text.startswith("~")
            fields = [field.strip() for field in text[1 if known else 0:].split("@@")]
            place = "%s:%d" % (os.path.relpath(path, ROOT), number)
            if len(fields) == 4:
                fields[2] = fields[2] or usual
            if len(fields) != 4 or not fields[0] or not fields[2] or not fields[3]:
                raise ListError("%s: a fault is `old text @@ new text @@ tests @@ what the fault is`" % place)
            if fields[0] == fields[1]:
                raise ListError("%s: the new text is the old one" % place)
            tests = [parse_test(test.strip()) for test in fields[2].split(",")]
            yield Mutant(header, place, fields[0], fields[1], tests, fields[3], known)


def read_lists():
    mutants = []
    for header in HEADERS + EXTRAS:
        path = os.path.join(MUTANTS, os.path.splitext(os.path.basename(header))[0] + ".txt")
        if os.path.exists(path):
            mutants += read_list(path, header)
    return mutants


def find(text, mutant):
    """The only place of the old text, as (begin, end)."""
    pattern = r"\s*\n\s*".join(re.escape(part.strip()) for part in mutant.old.split("\u23ce"))
    places = [match.span() for match in re.finditer(pattern, text)]
    if len(places) != 1:
        lines = ", ".join(str(text.count("\n", 0, begin) + 1) for begin, _ in places[:4])
        raise ListError("%s: `%s` occurs %d times in %s%s; adapt it to the header" %
                        (mutant.line, mutant.old, len(places), mutant.header,
                         " (lines %s)" % lines if lines else ""))
    if mutant.header in HEADERS and "IMPLEMENTATION_INCLUDED" not in text[:places[0][0]]:
        raise ListError("%s: `%s` is not in the bodies of %s" % (mutant.line, mutant.old, mutant.header))
    return places[0]


def apply(text, mutant):
    begin, end = find(text, mutant)
    return text[:begin] + mutant.new.replace("\u23ce", "\n") + text[end:]


def check(mutants):
    """Every error of the list at once."""
    errors = []
    texts = {}
    for mutant in mutants:
        if mutant.header not in texts:
            with open(os.path.join(ROOT, mutant.header), encoding="utf-8") as file:
                texts[mutant.header] = file.read()
        try:
            find(texts[mutant.header], mutant)
        except ListError as error:
            errors.append(str(error))
        for test in mutant.tests:
            if not os.path.exists(os.path.join(ROOT, source_of(test))):
                errors.append("%s: there is no test %s (%s)" % (mutant.line, test.name, source_of(test)))
    if errors:
        raise ListError("\n".join(errors))


# == building =========================================================================================


def source_of(test):
    if test.name.startswith("cuda/"):
        return "tests/support/cuda_tests.cu"
    folder, name = test.name.split("/")
    for path in ("tests/%s/test_%s.c" % (folder, name), "tests/%s/test_%s.cu" % (folder, name)):
        if os.path.exists(os.path.join(ROOT, path)):
            return path
    return path[:-1]


def macro_of(header):
    return os.path.splitext(header)[0].upper()


class Tree:
    """A copy of the headers, tests and examples, and the objects that were made of it."""

    def __init__(self, directory):
        self.directory = directory
        self.objects = os.path.join(directory, "objects")
        self.run_in = os.path.join(directory, "run")
        os.makedirs(self.objects, exist_ok=True)
        shutil.rmtree(self.run_in, ignore_errors=True)
        os.makedirs(self.run_in)
        for part in ("tests", "examples"):
            target = os.path.join(directory, part)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(os.path.join(ROOT, part), target,
                            ignore=shutil.ignore_patterns("__pycache__", "mutants"))
        for header in HEADERS:
            shutil.copy(os.path.join(ROOT, header), directory)
        self.common = self.hash_of(HEADERS + self.files("tests/support") + self.files("examples"))
        self.cuda = self.hash_of(self.files("tests/gpu") + self.files("tests/unit"))

    def files(self, part):
        found = []
        for folder, _, names in sorted(os.walk(os.path.join(self.directory, part))):
            found += [os.path.relpath(os.path.join(folder, name), self.directory) for name in sorted(names)]
        return found

    def hash_of(self, paths):
        digest = hashlib.sha1()
        for path in paths:
            with open(os.path.join(self.directory, path), "rb") as file:
                digest.update(path.encode() + b"\0" + file.read())
        return digest.hexdigest()

    def text(self, path):
        with open(os.path.join(self.directory, path), encoding="utf-8") as file:
            return file.read()

    def compile(self, source, flags, flavour, tag):
        """The object of a source; tag names the fault that the header has, "" is none."""
        cuda = source.endswith(".cu")
        command = ["g++", "-x", "c++", "-std=c++17", "-ffp-contract=off"] if cuda else ["gcc", "-std=gnu11"]
        command += ["-O0", "-w", "-pthread", "-DDDP_TEST_FLAVOUR=\"%s\"" % flavour,
                    "-DDDP_TEST_SLOWDOWN=%d" % (3 if flavour == "asan" else 1)]
        command += flags + ["-I.", "-Iexamples/gpt", "-Iexamples/extras", "-Itests/support"]
        command += ASAN if flavour == "asan" else []
        if flavour == "mpi":
            command += ["-DDDP_USE_MPI"] + mpi_flags("compile")
        if cuda:
            command += ["-isystem", cuda_include()]
        key = " ".join(command) + source + self.common + self.hash_of([source]) + tag
        if cuda:
            key += self.cuda
        name = source.replace("/", ".") + "." + hashlib.sha1(key.encode()).hexdigest()[:16] + ".o"
        target = os.path.join(self.objects, name)
        if not os.path.exists(target):
            self.call(command + ["-c", source, "-o", target + ".part"], "%s does not compile" % source)
            os.rename(target + ".part", target)
        return target

    def call(self, command, failure):
        done = subprocess.run(command, cwd=self.directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode != 0:
            raise ListError("%s:\n%s" % (failure, done.stdout.decode(errors="replace")[:2000]))

    def build(self, test, header, tag):
        """The program of a test, with a fault in `header` (None: without a fault)."""
        source = source_of(test)
        text = self.text(source)
        cuda = source.endswith(".cu")
        shared = cuda or "#define DDP_IMPLEMENTATION" not in text
        parts = []
        own = not shared or cuda
        if shared:
            parts.append(("tests/support/implementation.c", [], ("ddp.h", "ddp_fsdp.h")))
            if not cuda:
                for name in ("pipeline", "tensor"):
                    body = "tests/support/implementation_%s.c" % name
                    parts.append((body, BODIES_EXCLUDED[:1], ("ddp_%s.h" % name,)))
        flags = BODIES_EXCLUDED + ([] if cuda else SIBLINGS_EXCLUDED) if shared else []
        inside = [h for h in HEADERS if own or "#undef %s_IMPLEMENTATION_INCLUDED" % macro_of(h) in text]
        inside += [h for h in EXTRAS if h in text]
        parts.append((source, flags, inside))
        objects = [self.compile(path, flags, test.flavour, tag if header in of else "")
                   for path, flags, of in parts]
        digest = hashlib.sha1(" ".join(objects).encode()).hexdigest()[:12]
        program = os.path.join(self.objects, ".".join((test.flavour, test.name.replace("/", "."), digest)))
        if not os.path.exists(program):
            # A test that looks inside a sibling has its own bodies of it. Libraries come last: they add
            # the rest.
            archive = [o for o in objects if "implementation_" in o]
            command = ["g++" if cuda else "gcc", "-pthread"] + [o for o in objects if o not in archive]
            for one in archive:
                subprocess.run(["ar", "rcs", one + ".a", one], check=True)
                command.append(one + ".a")
            command += ASAN if test.flavour == "asan" else []
            command += [cuda_library(), "-ldl", "-lrt"] if cuda else ["-lcmocka"]
            command += mpi_flags("link") if test.flavour == "mpi" else []
            self.call(command + ["-lm", "-o", program + ".part"], "%s does not link" % test.name)
            os.rename(program + ".part", program)
        return program


def mpi_flags(kind):
    done = subprocess.run(["mpicc", "--showme:" + kind], check=True, stdout=subprocess.PIPE)
    return done.stdout.decode().split()


def cuda_home():
    nvcc = shutil.which("nvcc")
    return os.path.dirname(os.path.dirname(os.path.realpath(nvcc))) if nvcc else "/usr/local/cuda"


def cuda_include():
    return os.path.join(cuda_home(), "include")


def cuda_library():
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib"):
        path = os.path.join(cuda_home(), folder, "libcudart_static.a")
        if os.path.exists(path):
            return path
    return "-lcudart_static"


# == running ==========================================================================================


def run(program, test, directory, limit):
    """(whether the test passed, its last lines, seconds)"""
    arguments = list(test.arguments)
    if test.name.startswith("cuda/"):
        arguments.insert(0, test.name[5:])
    environment = dict(os.environ, **ENVIRONMENT)
    while arguments and "=" in arguments[-1]:
        name, value = arguments.pop().split("=", 1)
        environment["DDP_TEST_" + name] = value
    command = [program]
    if test.flavour == "mpi":  # 4by2: four ranks, two successive ones per emulated machine
        ranks, _, block = arguments.pop(0).partition("by")
        environment["DDP_TEST_BLOCK"] = block or "64"
        command = ["mpirun", "-n", ranks, program]
    start = time.time()
    log = os.path.join(directory, "log")
    with open(log, "wb") as out:
        process = subprocess.Popen(command + arguments, cwd=directory, stdin=subprocess.DEVNULL, stdout=out,
                                   stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            status = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            status = "still runs after %.0f s" % limit
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    with open(log, "rb") as file:
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if re.search(r"FAIL |ERROR|Sanitizer|runtime error", line)] or lines[-1:]
    word = "" if status in (0, 1) else str(status)
    return status == 0, word, (said[:1] or [""])[0].strip()[:150], time.time() - start


def baseline(tree, tests):
    """Every test once without a fault; the seconds that each took."""
    seconds = {}
    for test in tests:
        passed, status, said, took = run(tree.build(test, None, ""), test, tree.run_in, 600)
        if not passed:
            raise ListError("%s fails without a fault: %s %s" % (name_of(test), status, said))
        seconds[test] = took
        print("  passes  %-40s %5.1f s" % (name_of(test), took), flush=True)
    return seconds


def name_of(test):
    return (test.flavour + ":" if test.flavour != "plain" else "") + " ".join((test.name,) + test.arguments)


def tests_of(mutant):
    return ", ".join(name_of(test) for test in mutant.tests)


def describe(mutant):
    fields = (mutant.line, mutant.what, mutant.old, mutant.new or "(dropped)", tests_of(mutant))
    return "%s  %s\n    %s\n    -> %s\n    %s" % fields


def notice(tree, mutant, test, seconds, options):
    """The output of a test that notices the fault; empty when it passes. A failure counts only when the test
    passes without the fault directly afterwards: on a busy machine it might have failed or timed out for
    that."""
    program = tree.build(test, mutant.header, mutant.old + "@@" + mutant.new)
    limit = 20 + options.patience * seconds[test]
    for _ in range(3):
        passed, status, said, took = run(program, test, tree.run_in, limit)
        if passed:
            return ""
        if run(tree.build(test, None, ""), test, tree.run_in, limit)[0]:
            return "%s (%.1f s): %s %s" % (name_of(test), took, status, said)
    raise ListError("%s also fails without the fault" % name_of(test))


def try_mutant(tree, mutant, seconds, options):
    """Lines about the tests that noticed the fault; empty when none did."""
    path = os.path.join(tree.directory, mutant.header)
    text = tree.text(mutant.header)
    before = set(os.listdir(tree.objects))
    noticed = []
    with open(path, "w", encoding="utf-8") as file:
        file.write(apply(text, mutant))
    try:
        for test in mutant.tests:
            said = notice(tree, mutant, test, seconds, options)
            noticed += [said] if said else []
            if noticed and not options.all_tests:
                break
    finally:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        for name in set(os.listdir(tree.objects)) - before:  # it will not be built again
            os.unlink(os.path.join(tree.objects, name))
    return noticed


def worker(tree, todo, results, seconds, options):
    while True:
        try:
            mutant = todo.get_nowait()
        except queue.Empty:
            return
        try:
            noticed = try_mutant(tree, mutant, seconds, options)
        except ListError as error:
            results.put((mutant, None, str(error)))
            continue
        results.put((mutant, noticed, ""))


def prepare(tree, seconds):
    """Builds everything that a worker needs of the unchanged headers."""
    for test in seconds:
        tree.build(test, None, "")


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", metavar="PATTERN", default="")
    parser.add_argument("--jobs", metavar="N", type=int, default=1)
    parser.add_argument("--build", metavar="DIR", default=os.path.join(ROOT, "build", "mutate"))
    parser.add_argument("--patience", metavar="N", type=float, default=5)
    parser.add_argument("--all-tests", action="store_true")
    options = parser.parse_args()

    mutants = read_lists()
    check(mutants)
    if options.check:
        print("%d faults, each text occurs once" % len(mutants))
        return 0
    pattern = re.compile(options.only)
    mutants = [m for m in mutants
               if pattern.search(" @@ ".join((m.header, m.line, m.old, m.new, tests_of(m), m.what)))]
    if options.list:
        for m in mutants:
            print(("~ " if m.known else "") + describe(m))
        print("%d faults" % len(mutants))
        return 0

    os.makedirs(options.build, exist_ok=True)
    lock = open(os.path.join(options.build, "lock"), "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ListError("another run uses %s; choose another folder with --build" % options.build)
    tests = list(collections.OrderedDict.fromkeys(test for m in mutants for test in m.tests))
    trees = [Tree(os.path.join(os.path.abspath(options.build), str(i))) for i in range(max(1, options.jobs))]
    print("Without a fault, in %s" % options.build, flush=True)
    seconds = baseline(trees[0], tests)
    todo, results = queue.Queue(), queue.Queue()
    for m in mutants:
        todo.put(m)
    for tree in trees[1:]:
        prepare(tree, seconds)
    threads = [threading.Thread(target=worker, args=(tree, todo, results, seconds, options), daemon=True)
               for tree in trees]
    for thread in threads:
        thread.start()

    score = {}
    survivors, errors = [], []
    for i in range(len(mutants)):
        mutant, noticed, error = results.get()
        count = score.setdefault(mutant.header, [0, 0])
        if error:
            errors.append("%s: %s" % (mutant.line, error))
            word = "broken"
        else:
            count[1] += 1
            count[0] += bool(noticed)
            word = "noticed" if noticed else "SURVIVES"
            if not noticed:
                survivors.append(mutant)
        print("%3d/%d %-9s%s  %s" % (i + 1, len(mutants), word, mutant.line, mutant.what), flush=True)
        for line in noticed or []:
            note = "no longer a known survivor, take the ~ away: " if mutant.known else ""
            print("            %s%s" % (note, line), flush=True)

    print()
    for mutant in survivors:
        print("survives%s: %s" % (" (known)" if mutant.known else "", describe(mutant)))
    for error in errors:
        print("error: %s" % error)
    for header in score:
        print("%-16s %d of %d noticed" % (header, score[header][0], score[header][1]))
    noticed, total = sum(s[0] for s in score.values()), sum(s[1] for s in score.values())
    print("%d of %d faults noticed: %.1f%%" % (noticed, total, 100.0 * noticed / total if total else 0))
    return 2 if errors else any(not m.known for m in survivors)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ListError as fault:
        print("mutate.py: %s" % fault, file=sys.stderr)
        sys.exit(2)

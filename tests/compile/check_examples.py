#!/usr/bin/env python3
"""Checks the single-file examples: examples/*.c and *.cu.

    check_examples.py ROOT     prints one line per finding, exit status 1 if any

Each is small, includes only ddp headers, those of examples/extras and system headers, begins with its name and the line that compiles it, is run by
a test, and is named in README.md. Together with examples/gpt and examples/extras they call every public function.
The error texts that examples/troubleshooting.md quotes as `TEXT`: are texts of the headers.
check_examples_selftest.py proves that each rule fires.
"""
import glob
import os
import re
import sys

import check_headers

MAX_LINES, MAX_COLUMNS = 300, 110
LONGER = {"train_char_gpt.c": 500}  # a whole network
PLAIN = {"serial.c": "cc -O3 -march=native examples/serial.c -o serial -lm"}  # includes no ddp header


def compile_line(name):
    """The start of the line that compiles an example."""
    stem = name.rsplit(".", 1)[0]
    if name in PLAIN:
        return PLAIN[name]
    if name.endswith(".cu"):
        return "nvcc -std=c++17 -O3 -arch=native examples/%s -o %s -l" % (name, stem)
    return "cc -O3 -march=native examples/%s -o %s -lm -lpthread" % (name, stem)


def check_file(name, text):
    findings = []
    opening = check_headers.opening_comment(text)
    lines = text.rstrip("\n").split("\n")
    limit = LONGER.get(name, MAX_LINES)
    if len(lines) > limit:
        findings.append("%s: %d lines, allowed are %d" % (name, len(lines), limit))
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            findings.append("%s:%d: %d columns, allowed are %d" % (name, number, len(line), MAX_COLUMNS))
    for include in re.findall(r'^#include "([^"]*)"', text, re.M):
        is_ddp = include.startswith("../") and include[3:] in check_headers.HEADERS
        if not is_ddp and not re.fullmatch(r"extras/\w+\.h", include):
            findings.append('%s: includes "%s"; allowed are headers of ddp, of extras/ and of the system' % (name, include))
    if not opening.startswith("/*  %s - " % name):
        findings.append("%s: the first comment does not begin with /*  %s - PURPOSE" % (name, name))
    if compile_line(name) not in opening:
        findings.append("%s: the first comment lacks the line: %s" % (name, compile_line(name)))
    return findings


def public_functions(header):
    """The functions that the section >>api and those between it and >>spi declare."""
    start = re.search(r"^//== .*>>api$", header, re.M)
    end = re.compile(r"^//== .*>>(spi|impl-[a-z0-9-]+)$", re.M).search(header, start.end())
    return re.findall(r"^DDPDEF [^;(]*?\b(ddp_\w+)\(", check_headers.blank(header[start.end() : end.start()]), re.M)


def check_quotes(page, literals):
    """The quotes of error lines, such as `missing: rank`: or `a`, `b`: in an entry."""
    findings = []
    for quotes in re.findall(r"((?:`[^`]+`, )*`[^`]+`):", page):
        for quote in re.findall(r"`([^`]+)`", quotes):
            if quote not in literals:
                findings.append("examples/troubleshooting.md: `%s` is no text of the headers" % quote)
    return findings


def check(root):
    def read(path):
        with open(os.path.join(root, path), encoding="utf-8") as file:
            return file.read()

    def names(pattern):
        return sorted(os.path.relpath(path, root) for path in glob.glob(os.path.join(root, pattern)))

    findings, calls, literals = [], "", ""
    tests, readme = read("tests/parity/CMakeLists.txt"), read("README.md")
    for path in names("examples/*.c") + names("examples/*.cu"):
        name = os.path.basename(path)
        findings += check_file(name, read(path))
        if not re.search(r"\b%s\b" % re.escape(name.rsplit(".", 1)[0]), tests) and name.endswith(".c"):
            findings.append("%s: tests/parity/CMakeLists.txt has no test of it" % name)
        if "(examples/%s)" % name not in readme:
            findings.append("%s: README.md does not link to it" % name)
    for path in names("examples/*.c*") + names("examples/*/*.[ch]") + names("examples/*/*.cu*"):
        calls += check_headers.blank(read(path))
    for header in check_headers.HEADERS:
        if os.path.exists(os.path.join(root, header)):
            literals += re.sub(r'"\s*"', "", read(header))
            for function in public_functions(read(header)):
                if not re.search(r"\b%s\(" % function, calls):
                    findings.append("%s: no example calls %s" % (header, function))
    return findings + check_quotes(read("examples/troubleshooting.md"), literals)


def main(argv):
    findings = check(argv[1])
    for finding in findings:
        print(finding)
    print("%d findings" % len(findings))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

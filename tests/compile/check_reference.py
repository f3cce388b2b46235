#!/usr/bin/env python3
"""Builds the HTML reference of the headers with Doxygen, and checks that nothing is missing.

    check_reference.py ROOT WORK    the headers of ROOT; the pages are in WORK/html

Exit status 1 when a public function, type, macro or field has no comment, when a comment names a function or type that
does not exist, or when a public name is on no page. Doxyfile and doxygen_filter.py define how pages look.
check_reference_selftest.py proves that each fault is found. Messages are those of Doxygen 1.9.4 (Debian 12). With another
version they are only printed, and the exit status is 77 (skipped).
"""
import os
import re
import shutil
import subprocess
import sys

from check_headers import HEADERS

HERE = os.path.dirname(os.path.abspath(__file__))
VERSION = "1.9.4"
PUBLIC = re.compile(r"^(?:DDPDEF [^;(]*?\b(\w+)\(|(?:typedef )?struct (\w+) \{|    (DDP_\w+)(?: = \w+)?,? +/\*)", re.M)


def public_names(text):
    """Functions, structs and commented values of enums of a header, up to its implementation."""
    declarations = re.split(r"^//== .* >>impl-", text, maxsplit=1, flags=re.M)[0]
    return {name for names in PUBLIC.findall(declarations) for name in names if name}


def has_version():
    found = subprocess.run(["doxygen", "--version"], stdout=subprocess.PIPE, text=True)
    return found.stdout.split()[:1] == [VERSION]


def check(root, work):
    """Every finding, as text."""
    paths = [os.path.join(root, name) for name in HEADERS if os.path.exists(os.path.join(root, name))]
    names = os.path.join(work, "names.xml")
    os.makedirs(work, exist_ok=True)
    if os.path.exists(names):
        os.remove(names)
    environment = dict(os.environ, DDP_REFERENCE=work, DDP_HEADERS=" ".join('"%s"' % path for path in paths),
                       DDP_FILTER='"%s" "%s"' % (sys.executable, os.path.join(HERE, "doxygen_filter.py")))
    doxygen = subprocess.run(["doxygen", os.path.join(HERE, "Doxyfile")], env=environment, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    findings = sorted({line.replace(" error: ", " ") for line in doxygen.stdout.split("\n") if line.strip()})
    if doxygen.returncode and not findings:
        findings.append("doxygen: exit status %d" % doxygen.returncode)
    present = set()
    if os.path.exists(names):
        with open(names) as file:
            present = set(re.findall(r"<name>(\w+)</name>", file.read()))
    for path in paths:
        with open(path) as file:
            missing = public_names(file.read()) - present
        findings += ["%s: %s is on no page" % (os.path.basename(path), name) for name in sorted(missing)]
    return findings


def main(argv):
    root, work = os.path.abspath(argv[1]), os.path.abspath(argv[2])
    if not shutil.which("doxygen"):
        return "install doxygen (Debian, Ubuntu: apt-get install doxygen)"
    findings = check(root, work)
    for finding in findings:
        print(finding)
    print("%s: %d findings" % (os.path.join(work, "html", "index.html"), len(findings)))
    return 0 if not findings else 1 if has_version() else 77


if __name__ == "__main__":
    sys.exit(main(sys.argv))

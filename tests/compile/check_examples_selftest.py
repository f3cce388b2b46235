#!/usr/bin/env python3
"""Gives check_examples.py a small tree: it must accept a good one and report each fault."""
import os
import tempfile
import unittest

import check_examples

HEADER = "//== api ===== >>api\n/* ddp_ping() */\nDDPDEF int ddp_ping(int value);\n//== interface === >>spi\nint ddp_inner(int a);\n/* \"ping \" \"failed\" */"
EXAMPLE = """/*  ping.c - calls one function.

    cc -O3 -march=native examples/ping.c -o ping -lm -lpthread */
#include "../ddp.h"
#include <stdio.h>
int main(void) { return ddp_ping(0); }
"""


class CheckExamples(unittest.TestCase):
    def findings(self, example=EXAMPLE, readme="[ping](examples/ping.c)", tests="example.ping SOURCE examples/ping.c", header=HEADER, page="`ping failed`: remedy"):
        with tempfile.TemporaryDirectory() as root:
            os.makedirs(os.path.join(root, "examples"))
            os.makedirs(os.path.join(root, "tests/parity"))
            files = {"ddp.h": header, "README.md": readme, "tests/parity/CMakeLists.txt": tests, "examples/ping.c": example,
                     "examples/troubleshooting.md": page}
            for path, text in files.items():
                with open(os.path.join(root, path), "w") as file:
                    file.write(text)
            return check_examples.check(root)

    def only(self, findings, text):
        self.assertEqual(len(findings), 1, findings)
        self.assertIn(text, findings[0])

    def test_a_good_tree(self):
        self.assertEqual(self.findings(), [])

    def test_quotes_of_error_lines(self):
        self.only(self.findings(page="- **Hangs.** `ping failed`, `pong`: remedy, `code`, `x`"), "`pong` is no text")

    def test_length_and_width(self):
        self.only(self.findings(EXAMPLE + "\n" * 294 + "int last;\n"), "301 lines")
        self.only(self.findings(EXAMPLE + "/* %s */\n" % ("x" * 105)), "111 columns")

    def test_includes(self):
        for include in ("gpt/train.h", "../bench/bench.h", "ddp.h"):
            self.only(self.findings(EXAMPLE.replace("#include <stdio.h>", '#include "%s"' % include)), "includes")

    def test_first_comment(self):
        self.only(self.findings(EXAMPLE.replace("ping.c - calls", "calls")), "does not begin")
        self.only(self.findings(EXAMPLE.replace("-march=native ", "")), "lacks the line")

    def test_mentions(self):
        self.only(self.findings(tests="example.pong"), "has no test")
        self.only(self.findings(readme="ping.c"), "does not link")

    def test_calls(self):
        self.only(self.findings(EXAMPLE.replace("return ddp_ping(0)", "return 0; /* ddp_ping(0) */")), "no example calls ddp_ping")


if __name__ == "__main__":
    unittest.main()

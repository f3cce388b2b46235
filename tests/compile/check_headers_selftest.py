#!/usr/bin/env python3
"""Feeds check_headers.py a clean header, which it must accept, and broken ones, each of which it must report."""
import os
import tempfile
import unittest

import check_headers

LICENCE = "Licence\n\nUse it as you like,\nwithout warranty.\n"

GOOD = '''/*  demo.h - a header as it should be; exit( and printf( in a comment do not count.

USAGE
    Include it.

EXAMPLE
    #include "ddp.h"
    int main(void) { return ddp_answer() - 42; }

CONTENTS      (search for the tags)
    >>config  >>types  >>descs  >>api  >>impl-structs
    >>impl-public

CONCEPTS
    None.

ERRORS
    None.

CONFIG MACROS (define before including)
    None.

NOT DONE HERE
    Everything else.
*/
#ifndef DDP_DEMO_H
#define DDP_DEMO_H

//== config ==================== >>config
#ifdef __cplusplus
extern "C" {
#endif
//== types ===================== >>types
//== descs ===================== >>descs
//== api ======================= >>api
int ddp_answer(void);
#ifdef __cplusplus
}
#endif
//== structs =================== >>impl-structs
#include <stdio.h>
#include <unistd.h>
#define DDP__TWICE(x) \\
    ((x) + (x))
static int ddp__table[2] = {1, 2};
static inline __attribute__((unused)) int ddp__half(int x) {
    static int calls;
    calls++;
    return x / 2 + ddp__table[0] - 1;
}
//== public ==================== >>impl-public
int ddp_answer(void) {
    char text[16];
    snprintf(text, sizeof text, "printf(exit(");
    if (ddp__half(2) > 1) _exit(1);
    return DDP__TWICE(21);
}
#endif

/*
Licence

Use it as you like,
without warranty.
*/
'''

# What to replace, by what, and a part of the message that must appear.
BROKEN = [
    (">>impl-structs\n    >>impl-public", ">>impl-public\n    >>impl-structs", "not in the order of the banners"),
    ("    >>impl-public\n", "", "section >>impl-public is not in CONTENTS"),
    (">>impl-structs\n", ">>impl-structs  >>impl-ghost\n", "CONTENTS lists >>impl-ghost"),
    ("//== types ===================== >>types", "//== types =====================", "a banner reads"),
    ("//== types ===================== >>types", "// ==== types ==== >>types", "a banner reads"),
    ("//== types ===================== >>types", "//== types == >>descs", "section >>descs appears 2 times"),
    ("CONCEPTS\n    None.\n", "", "no CONCEPTS"),
    ("USAGE\n    Include it.\n", "", "no USAGE"),
    ("    None.\n\nERRORS", "    None.\n" * 200 + "\nERRORS", "the opening comment has"),
    ("EXAMPLE\n", "EXAMPLE\n" + "    ;\n" * 30, "EXAMPLE has 32 lines"),
    ("return DDP__TWICE(21);", 'printf("hello"); return 42;', "`printf` in a header"),
    ("return DDP__TWICE(21);", 'puts("hello"); return 42;', "`puts` in a header"),
    ("return DDP__TWICE(21);", 'fprintf(log, "hello"); return 42;', "`fprintf` in a header"),
    ("return DDP__TWICE(21);", "fflush(stderr); return 42;", "`stderr` in a header"),
    ("return DDP__TWICE(21);", "assert (1); return 42;", "`assert` in a header"),
    ("return DDP__TWICE(21);", "abort(); return 42;", "`abort` in a header"),
    ("return DDP__TWICE(21);", "exit(1); return 42;", "`exit` in a header"),
    ("return DDP__TWICE(21);", "_exit(1); return 42;", "`_exit` is for the child"),
    ("#define DDP__TWICE(x) \\\n", "#define DDP__TWICE(x) exit(1), \\\n", "`exit` in a header"),
    ("ddp__half", "half", "`half` is static"),
    ("ddp__table", "table", "`table` is static"),
    ("DDP__TWICE", "TWICE", "macro `TWICE`"),
    ("return DDP__TWICE(21);", "\n" * 80 + "return 42;", "a function of 86 lines"),
    ("return DDP__TWICE(21);", "text[0] = 1, text[1] = 2; return 42;", "a comma operator"),
    ("return DDP__TWICE(21);", "while (text[0] = 1, text[1]) {} return 42;", "a comma operator"),
    ("return DDP__TWICE(21);", "return text[0]++, 42;", "a comma operator"),
    ("int x)", "int\tx)", "tab"),
    ("return x", "return x" + " " * 190, "columns"),
    ("calls++;", "calls++; \n", "space at the end"),
    ("None.", "N\u00f6ne.", "outside ASCII"),
    ("without warranty", "without any warranty", "words of LICENSE"),
    ("/*\nLicence", "/*\nLicence\n*/\n/* other */\n/*", "words of LICENSE"),
    ("/*  demo.h", "#pragma once\n/*  demo.h", "does not start with"),
]


class Style(unittest.TestCase):
    def test_accepts_a_clean_header(self):
        self.assertEqual(check_headers.check_header("ddp.h", GOOD, LICENCE), [])

    def test_reports_each_fault(self):
        for old, new, message in BROKEN:
            with self.subTest(message=message, new=new[:40]):
                self.assertIn(old, GOOD)
                findings = check_headers.check_header("ddp.h", GOOD.replace(old, new), LICENCE)
                self.assertTrue(any(message in text for _, text in findings), findings)

    def test_accepts_members_with_such_names(self):
        text = GOOD.replace("return DDP__TWICE(21);", "table->abort(1); table.exit(2); return 42;")
        self.assertEqual(check_headers.check_header("ddp.h", text, LICENCE), [])

    def test_accepts_commas_of_lists(self):
        code = ("int a = 1, *b = &a, c[2] = {1, 2}; enum { X = 1, Y }; for (a = 1, *b = 2; a < 3; a++, c[0]++) {} "
                "snprintf(text, sizeof text, (const char *)b, c[a]); return DDP__TWICE(21);")
        text = GOOD.replace("return DDP__TWICE(21);", code.replace("; ", ";\n    "))
        self.assertEqual(check_headers.check_header("ddp.h", text, LICENCE), [])

    def test_names_the_line(self):
        findings = check_headers.check_header("ddp.h", GOOD.replace("    return DDP__TWICE(21);", "\n    abort();"), LICENCE)
        self.assertEqual([GOOD[: GOOD.index("return DDP__")].count("\n") + 2], [line for line, _ in findings])

    def test_leaving_is_for_ddp_h_alone(self):
        findings = check_headers.check_header("ddp_fsdp.h", GOOD, LICENCE)
        self.assertTrue(any("`_exit`" in text for _, text in findings), findings)


class Examples(unittest.TestCase):
    def failures(self, example, readme=""):
        with tempfile.TemporaryDirectory() as root:
            text = "/*  d\n\nEXAMPLE\n%s\nCONTENTS\n*/\nstatic inline int ddp_answer(void) { return 42; }\n"
            with open(os.path.join(root, "ddp.h"), "w") as file:
                file.write(text % "".join("    " + line + "\n" for line in example.split("\n")))
            with open(os.path.join(root, "README.md"), "w") as file:
                file.write(readme)
            return check_headers.check_examples(root, os.path.join(root, "work"), ["ddp.h"])

    def test_runs_the_example(self):
        self.assertEqual(self.failures('#include "ddp.h"\nint main(void) { return ddp_answer() - 42; }'), [])

    def test_reports_a_failing_example(self):
        self.assertIn("status 1", self.failures('#include "ddp.h"\nint main(void) { return ddp_answer() - 41; }')[0])

    def test_reports_a_broken_example(self):
        self.assertIn("does not compile", self.failures("int main(void) { return missing; }")[0])

    def test_reports_a_hanging_example(self):
        seconds, check_headers.EXAMPLE_SECONDS = check_headers.EXAMPLE_SECONDS, 0.2
        try:
            self.assertIn("still runs", self.failures("int main(void) { for (;;) {} }")[0])
        finally:
            check_headers.EXAMPLE_SECONDS = seconds

    def test_compiles_readme_programs_only(self):
        fine = "int main(void) { return 0; }"
        self.assertEqual(self.failures(fine, "```c\nint fragment = a b;\n```\n```c\nint main(void) { return 0; }\n```\n"), [])
        self.assertIn("README.md:2", self.failures(fine, "```c\nint main(void) { return a b; }\n```\n")[0])


if __name__ == "__main__":
    unittest.main()

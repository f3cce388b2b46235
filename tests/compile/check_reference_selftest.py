#!/usr/bin/env python3
"""Feeds check_reference.py a documented header, which it must accept, and faulty ones, each of which it must report.

    check_reference_selftest.py WORK    exit status 77 (skipped) if doxygen has another version than Debian 12's
"""
import html
import os
import re
import shutil
import sys
import unittest

import check_reference

GOOD = '''/*  ddp.h - a header as it should be.

USAGE
    #include "ddp.h"

EXAMPLE
    int main(void) {
        ddp_demo demo = {0};
        printf("100%\\n");                // a comment

        return ddp_answer(&demo) & 42;
    }

CONCEPTS
    Answer  A number. This text is long enough that a page shows it in more than one line of a comment,
            with columns:
                1 @ 2      3 < 4

NOT DONE HERE
    Everything else, see https://example.org/a_b.
*/
#ifndef DDP_H
#define DDP_H
//== config ==================== >>config
#define DDPDEF extern

//== types ===================== >>types

/* One list defines the enum and the texts. */
#define DDP_RESULTS(X)    \\
    X(DDP_OK, 0, "success") \\
    X(DDP_ERR_INVALID, -1, "an argument is wrong")

/* The result of a call. */
typedef enum ddp_result {
#define DDP_X(name, value, text) name = value,
    DDP_RESULTS(DDP_X)
#undef DDP_X
} ddp_result;

/* A choice. */
typedef enum ddp_choice {
    DDP_CHOICE_ONE = 0, /* the first */
    DDP_CHOICE_TWO      /* the second */
} ddp_choice;

/* A list of functions. */
#define DDP_DEVICE_MEMORY(X)                    \\
    /* allocates */                             \\
    X(alloc, int, (int count))                  \\
    X(free, void, (void *memory)) /* frees */

/* A table of these functions. */
typedef struct ddp_device {
#define DDP_X(name, result, arguments) result (*name) arguments;
    DDP_DEVICE_MEMORY(DDP_X)
#undef DDP_X
} ddp_device;

typedef struct ddp_hidden ddp_hidden; /* a handle */

/* A demo: two rows.
       // both
       *row is one
       row 0   1 2
       row 1   3 4 */
typedef struct ddp_demo {
    int first, second; /* 0 = 1; the
                          numbers */
    /* NULL = none. May be NULL */
    void (*call)(void *user);
    void *user;        /* of call */
} ddp_demo;

//== api ======================= >>api

/* --- answers ---
   All answers are right. */

/* Returns the answer.
   *demo is read, `first` only. See ddp_demo.second.
   Ownership: none. Errors: DDP_ERR_INVALID when demo is NULL. */
DDPDEF ddp_result ddp_answer(const ddp_demo *demo);
DDPDEF void ddp_forget(ddp_hidden *hidden); /* NULL is ignored */
#endif

#if defined(DDP_IMPLEMENTATION)
//== structs =================== >>impl-structs
typedef struct ddp__private { int x; } ddp__private;
ddp_result ddp_answer(const ddp_demo *demo) { return demo ? DDP_OK : DDP_ERR_INVALID; }
#endif
'''

# What to replace, by what, and a part of the message that must appear.
BROKEN = [
    ("DDPDEF void ddp_forget(ddp_hidden *hidden); /* NULL is ignored */", "DDPDEF void ddp_forget(ddp_hidden *hidden);",
     "Member ddp_forget(ddp_hidden *hidden) (function) of group ddp_h_answers is not documented"),
    ("void *user;        /* of call */", "void *user;", "Member user (variable) of struct ddp_demo is not documented"),
    ("/* 0 = 1; the\n                          numbers */", "", "Member second (variable) of struct ddp_demo is not documented"),
    ("    /* NULL = none. May be NULL */\n", "", "Member call)(void *user) (variable) of struct ddp_demo is not documented"),
    ("    /* allocates */                             \\\n", "",
     "Member alloc)(int count) (variable) of struct ddp_device is not documented"),
    ("DDP_CHOICE_ONE = 0, /* the first */",
     "#if 0\n    DDP_CHOICE_ONE = 0, /* the first */\n#endif", "ddp.h: DDP_CHOICE_ONE is on no page"),
    (" /* a handle */", "", "Member ddp_hidden (typedef) of group ddp_h_types is not documented"),
    ("/* The result of a call. */", "", "Member ddp_result (enumeration) of group ddp_h_types is not documented"),
    ("/* A demo: two rows.\n       // both\n       *row is one\n       row 0   1 2\n       row 1   3 4 */", "",
     "Compound ddp_demo is not documented"),
    ("/* One list defines the enum and the texts. */", "",
     "DDP_RESULTS(X) (macro definition) of group ddp_h_types is not documented"),
    ("See ddp_demo.second", "See ddp_demo.third", "explicit link request to 'ddp_demo.third' could not be resolved"),
    ("Errors: DDP_ERR_INVALID", "Errors: DDP_ERR_INVALIDE", "explicit link request to 'DDP_ERR_INVALIDE' could not be resolved"),
    ("DDPDEF ddp_result ddp_answer(const ddp_demo *demo);", "#if 0\nDDPDEF ddp_result ddp_answer(const ddp_demo *demo);\n#endif",
     "ddp.h: ddp_answer is on no page"),
]
WORK = ""


def reference(text):
    """The findings, and the words of all pages."""
    shutil.rmtree(WORK, ignore_errors=True)
    os.makedirs(WORK)
    with open(os.path.join(WORK, "ddp.h"), "w") as file:
        file.write(text)
    findings = check_reference.check(WORK, WORK)
    pages = ""
    folder = os.path.join(WORK, "html")
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        if name.endswith(".html"):
            with open(os.path.join(folder, name)) as file:
                pages += html.unescape(re.sub(r"<[^>]*>", "", file.read()))
    return findings, pages


class Reference(unittest.TestCase):
    def test_documented(self):
        findings, pages = reference(GOOD)
        self.assertEqual(findings, [])
        for text in [
                "        printf(\"100%\\n\");                // a comment\n\n        return ddp_answer(&demo) & 42;\n    }",
                "            with columns:\n                1 @ 2      3 < 4",
                "Everything else, see https://example.org/a_b.", "\"an argument is wrong\"", "All answers are right.",
                "        // both\n        *row is one\n        row 0   1 2\n        row 1   3 4", "0 = 1; the numbers",
                "NULL = none. May be NULL",
                "*demo is read, first only.", "Ownership: none.", "a handle", "of call", "the first", "the second",
                "allocates", "frees", "(*\xa0alloc )(int count)", "NULL is ignored"]:
            self.assertTrue(text in pages, text)
        self.assertFalse("ddp__private" in pages)

    def test_filter_is_short(self):
        with open(os.path.join(check_reference.HERE, "doxygen_filter.py")) as file:
            self.assertLessEqual(len(file.readlines()), 30)

    def test_faults(self):
        for old, new, message in BROKEN:
            with self.subTest(message=message):
                self.assertIn(old, GOOD)
                findings, _ = reference(GOOD.replace(old, new))
                self.assertTrue(any(message in finding for finding in findings), findings)


if __name__ == "__main__":
    WORK = os.path.abspath(sys.argv.pop())
    if not check_reference.has_version():
        print("doxygen is not version " + check_reference.VERSION)
        sys.exit(77)
    unittest.main()

#!/usr/bin/env python3
"""Feeds error_texts.py a small header: it must find every text, accept a clean one, and report each fault."""
import unittest

import error_texts

HEADER = r'''/* "no text" */
#include "ddp.h"
#define DDP_RESULTS(X)                   \
    X(DDP_OK, 0, "success")              \
    X(DDP_ERR_INVALID, -1, "an argument is invalid")
//== api ======================= >>api
#ifdef __cplusplus
extern "C" {
#endif
DDPDEF ddp_result ddp_open(const char *name, int count);
DDPDEF ddp_result ddp_run(int count);
#ifdef __cplusplus
}
#endif
//== structs =================== >>impl-structs
typedef struct ddp_table { const char *name; ddp_result (*start)(int count); } ddp_table;
#define DDP__STATE "state.json"
#define DDP_CHECK(who, group, condition, ...)                                          \
    do {                                                                               \
        if (!(condition)) return ddp_fail_in(DDP_ERR_INVALID, who, group, __VA_ARGS__); \
    } while (0)
#define DDP__NEED(condition, ...) DDP_CHECK(__func__, NULL, condition, __VA_ARGS__)
#define DDP__RANK_FAIL(of, result, text, ...) ddp_fail(result, "rank %d " text, (of)->rank, __VA_ARGS__)
//== files ===================== >>impl-files
static ddp_result ddp__file_fail(const char *what, const char *path) {
    return ddp_fail(DDP_ERR_SYSTEM, "%s %s: %s", what, path, strerror(errno));
}
static ddp_result ddp__line_fail(int line, const char *format, ...) {
    vsnprintf(text, sizeof text, format, args);
    return ddp_fail(DDP_ERR_CORRUPT, "line %d: %s", line, text);
}
static ddp_result ddp__begin(int count) {
    if (count > 8) return ddp__line_fail(3, "expected %s", word);
    if (count > 9) return DDP__RANK_FAIL(here, DDP_ERR_MISMATCH, "count=%d is more than 9", count);
    return ddp_fail(count ? DDP_ERR_CORRUPT : DDP_ERR_INVALID, "%s/" DDP__STATE ": is %s",
                    path, count ? "too short" : "missing");
}
static const ddp_table ddp__table = {"local", ddp__begin};
//== drawing: SVG ============== >>impl-svg
static const char *ddp__legend(void) { return "Who turns. No error text"; }
//== public ==================== >>impl-public
ddp_result ddp_open(const char *name, int count) {
    char cause[64];
    DDP__NEED(name, "name is NULL; pass the name of a file");
    if (!strcmp(name, "a literal that is compared")) return ddp__file_fail("could not open", name);
    snprintf(cause, sizeof cause, "rank %d (pid %d) exited", 1, 2);
    return ddp_fail(DDP_ERR_PEER_LOST, "%s", cause);
}
ddp_result ddp_run(int count) { return table->start(count); }
'''

# What to replace, by what, and a part of the message that must appear.
BROKEN = [
    ("name is NULL;", "name is told to be NULL;", "`told`: the term is"),
    ("is more than 9", "has the seat of rank 9", "`seat`: the term is"),
    ("is more than 9", "turned away by rank 9", "`turned away`: the term is"),
    ("exited\"", "is a stranger\"", "`stranger`: the term is"),
    ("too short", "so many bytes", "`so many`: the term is"),
    ("could not open", "who opens", "`who`: the term is"),
    ("\"local\"", "\"venue\"", "`venue`: the term is"),
    ("an argument is invalid", "an argument shall be right", "`shall`: the term is"),
    ("count=%d is more than 9", "time out after %d ms", "`time out`: the term is"),
    ("count=%d is more than 9", "%d microbatches do not fit", "`microbatches`: the term is"),
    ("exited\"", "was not initialised\"", "`initialised`: the term is"),
    ("pass the name of a file", "pass a socket-name; a socket name is short", "two spellings of one word"),
    ("pass the name of a file", "pass the re-name; rename it", "two spellings of one word"),
    ("pass the name of a file", "pass the name of a file.", "a full stop"),
    ("name is NULL;", "name is NULL. Please", "more than one sentence"),
    ("name is NULL;", "Name is NULL;", "a capital"),
    ("name is NULL; pass", "name is NULL;\\npass", "a line break"),
    ("count=%d is more than 9", "count=%d", "no cause"),
    ("name is NULL; pass the name of a file", "", "no cause"),
    ("ddp_fail", "ddp_other", "no setter"),
]


def findings(text):
    return [message for _, _, message in error_texts.check(error_texts.Program([("ddp.h", text)]))]


class Table(unittest.TestCase):
    def setUp(self):
        self.program = error_texts.Program([("ddp.h", HEADER)])

    def row(self, text):
        rows = [row for row in self.program.rows if text in row.text]
        self.assertEqual(len(rows), 1, [row.text for row in self.program.rows])
        return rows[0]

    def test_each_literal_has_a_kind(self):
        """Counted without the parser: in the text as it is, by quotes."""
        plain = error_texts.re.sub(r"/\*.*?\*/|^#include.*$|^extern.*$", "", HEADER, flags=error_texts.re.M)
        literals = error_texts.re.findall(r'"(?:\\.|[^"\\])*"', plain)
        pieces = "\n".join(raw for _, _, _, _, raw in self.program.literals)
        for literal in literals:
            self.assertIn(literal[1:-1], pieces)

    def test_finds_the_texts(self):
        texts = sorted((row.kind, row.result, row.text) for row in self.program.rows)
        self.assertEqual(texts, [
            ("error", "DDP_ERR_CORRUPT", "expected {word}"),
            ("error", "DDP_ERR_CORRUPT", "line {line}: {text}"),
            ("error", "DDP_ERR_CORRUPT or DDP_ERR_INVALID", "{path}/state.json: is {too short|missing}"),
            ("error", "DDP_ERR_INVALID", "name is NULL; pass the name of a file"),
            ("error", "DDP_ERR_MISMATCH", "count={count} is more than 9"),
            ("error", "DDP_ERR_PEER_LOST", "{cause}"),
            ("error", "DDP_ERR_SYSTEM", "{what} {path}: {strerror(errno)}"),
            ("error", "variable", "rank {(of)->rank} <text>"),
            ("part", "-", "rank {1} (pid {2}) exited"),
            ("part", "DDP_ERR_SYSTEM", "could not open"),
            ("result", "DDP_ERR_INVALID", "an argument is invalid"),
            ("result", "DDP_OK", "success")])

    def test_names_section_line_and_function(self):
        row = self.row("name is NULL")
        line = HEADER[:HEADER.index('"name is NULL')].count("\n") + 1
        self.assertEqual((row.section, row.line, row.function), ("impl-public", line, "ddp_open"))

    def test_knows_who_reaches_a_text(self):
        self.assertEqual(error_texts.reached_by(self.program, self.row("could not open"), True), "ddp_open")
        self.assertEqual(error_texts.reached_by(self.program, self.row("more than 9"), True), "ddp_run")  # through the table

    def test_finds_a_setter_behind_two_macros(self):
        self.assertEqual(self.program.setters["DDP__NEED"], (1, "DDP_ERR_INVALID", "__func__"))
        self.assertEqual(self.program.setters["DDP__RANK_FAIL"], (2, 1, None))


class Rules(unittest.TestCase):
    def test_accept_a_clean_header(self):
        self.assertEqual(findings(HEADER), [])

    def test_report_each_fault(self):
        for old, new, message in BROKEN:
            with self.subTest(message=message, new=new):
                self.assertIn(old, HEADER)
                found = findings(HEADER.replace(old, new))
                self.assertTrue(any(message in text for text in found), found)

    def test_accept_identifiers_and_quotes(self):
        for name in ("turn_count=%d", "params[%d].seat=%d", "'turn'", "ddp_lies_here"):
            self.assertEqual(findings(HEADER.replace("count=%d is", name + " is")), [])


if __name__ == "__main__":
    unittest.main()

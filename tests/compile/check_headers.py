#!/usr/bin/env python3
"""Checks that the headers are written the way the house promises, and that the code in their comments works.

    check_headers.py ROOT                   style of every header in ROOT; prints one line per finding, exit status 1 if any
    check_headers.py ROOT --examples WORK   compiles and runs the EXAMPLE of each header and compiles the programs of README.md

The compilers are $CC (cc) and, for .cuh, $NVCC when set. check_headers_selftest.py proves that each rule fires.
"""
import os
import re
import subprocess
import sys
import textwrap

HEADERS = ["ddp.h", "ddp_fsdp.h", "ddp_pipeline.h", "ddp_tensor.h", "ddp_cuda.cuh"]
HEADINGS = ["USAGE", "EXAMPLE", "CONTENTS", "CONCEPTS", "ERRORS", "CONFIG MACROS", "NOT DONE HERE"]
MAX_OPENING, MAX_EXAMPLE, MAX_COLUMNS, MAX_FUNCTION = 200, 26, 110, 80
EXAMPLE_SECONDS = 60

# Functions that end the program or write where the user did not ask. Members of a table of functions may have these names.
FORBIDDEN = re.compile(
    r"(?<!->)(?<!\.)\b(exit|_Exit|quick_exit|abort|assert|printf|fprintf|vprintf|vfprintf|dprintf|vdprintf|puts|fputs|fputc|putc|putchar|perror)"
    r"\s*\(|\b(stdout|stderr)\b")
BANNER = re.compile(r"^//== (\S.*?) =+ >>([a-z0-9][a-z0-9-]*)$")


def blank(text):
    """The same text, line for line, with the contents of comments, strings and character constants as spaces."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)

    def spaces(match):
        token = match.group(0)
        if token[0] in "\"'":
            return token[0] + " " * (len(token) - 2) + token[0]
        return re.sub(r"[^\n]", " ", token)

    return pattern.sub(spaces, text)


def without_preprocessor(code):
    """Blanked code with its directives, continuation lines included, as empty lines."""
    out, continued = [], False
    for line in code.split("\n"):
        directive = continued or line.lstrip().startswith("#")
        continued = directive and line.endswith("\\")
        out.append("" if directive else line)
    return "\n".join(out)


def file_scope(code):
    """Directive-free code with everything inside braces as spaces; extern "C" { does not count as a brace."""
    code = re.sub(r'extern "[^"]*"\s*\{', lambda m: re.sub(r"[^\n]", " ", m.group(0)), code)
    out, depth = [], 0
    for char in code:
        if char == "}":
            depth = max(depth - 1, 0)
        out.append(char if depth == 0 or char == "\n" else " ")
        if char == "{":
            depth += 1
    return "".join(out)


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


def opening_comment(text):
    return text[: text.index("*/") + 2] if text.startswith("/*") and "*/" in text else ""


def section(opening, heading):
    """The lines under a heading of the opening comment, up to the next heading."""
    found = re.search(r"^%s\b[^\n]*\n(.*?)(?=^[A-Z]{4}|^\*/|\Z)" % re.escape(heading), opening, re.S | re.M)
    return found.group(1) if found else ""


def example_of(text):
    return textwrap.dedent(section(opening_comment(text), "EXAMPLE")).strip("\n")


def normal(words):
    """Words of a text without comment decoration."""
    return re.sub(r"[\s*/]+", " ", words).strip()


def check_opening(text, report):
    opening = opening_comment(text)
    if not opening:
        report(1, "the file does not start with a /* comment */")
        return
    if opening.count("\n") + 1 > MAX_OPENING:
        report(1, "the opening comment has %d lines, allowed are %d" % (opening.count("\n") + 1, MAX_OPENING))
    at = [(re.search(r"^%s\b" % heading, opening, re.M), heading) for heading in HEADINGS]
    for found, heading in at:
        if not found:
            report(1, "the opening comment has no %s" % heading)
    starts = [found.start() for found, _ in at if found]
    if starts != sorted(starts):
        report(1, "the headings of the opening comment are not in the order " + ", ".join(HEADINGS))
    example = example_of(text)
    if example.count("\n") + 1 > MAX_EXAMPLE:
        report(1, "EXAMPLE has %d lines, allowed are %d" % (example.count("\n") + 1, MAX_EXAMPLE))


def check_banners(text, report):
    contents = re.findall(r">>([a-z0-9][a-z0-9-]*)", section(opening_comment(text), "CONTENTS"))
    banners = []
    for number, line in enumerate(text.split("\n"), 1):
        if re.match(r"\s*//\s?={2,}", line):
            found = BANNER.match(line)
            if found:
                banners.append((number, found.group(2)))
            else:
                report(number, "a banner reads `//== topic ==== >>tag`")
    tags = [tag for _, tag in banners]
    for number, tag in banners:
        if tag not in contents:
            report(number, "section >>%s is not in CONTENTS" % tag)
        if tags.count(tag) > 1:
            report(number, "section >>%s appears %d times" % (tag, tags.count(tag)))
    for tag in contents:
        if tag not in tags:
            report(1, "CONTENTS lists >>%s, which no banner has" % tag)
    if sorted(tags) == sorted(contents) and tags != contents:
        report(1, "CONTENTS is not in the order of the banners: " + " ".join(">>" + tag for tag in tags))
    public = [tag for tag in tags if not tag.startswith("impl-")]
    private = [tag for tag in tags if tag.startswith("impl-")]
    if tags != public + private:
        report(1, "the sections >>impl-... follow all others")
    if [tag for tag in public if tag != "kernels"][:4] != ["config", "types", "descs", "api"]:
        report(1, "the sections begin with >>config >>types >>descs >>api; >>kernels may follow >>config")
    if private and (private[0] != "impl-structs" or private[-1] != "impl-public"):
        report(1, "the implementation begins with >>impl-structs and ends with >>impl-public")


def check_first_api(text, code, report):
    found = re.search(r"^(?!typedef\b|static\b|#)[A-Za-z_][\w \t*]*\bddp_[a-z]\w*[ \t]*\(", code, re.M)
    if not found:
        report(1, "no public function is declared")


def check_calls(name, code, report):
    code = re.sub(r"^[ \t]*#[ \t]*(include|error|warning)[^\n]*", "", code, flags=re.M)
    for found in FORBIDDEN.finditer(code):
        report(line_of(code, found.start()), "`%s` in a header: errors are values, and a library does not print"
               % (found.group(1) or found.group(2)))
    leaves = list(re.finditer(r"\b_exit\s*\(", code))
    for found in leaves[1:] if name == "ddp.h" else leaves:
        report(line_of(code, found.start()), "`_exit` is for the child of ddp_launch in ddp.h alone")


def check_names(code, report):
    scope = file_scope(without_preprocessor(code))
    scope = re.sub(r"__attribute__\s*\(\(.*?\)\)", lambda m: " " * len(m.group(0)), scope)
    for found in re.finditer(r"\bstatic\b([^;{}()=\[]*?)\b(\w+)\s*(?=[(=;\[])", scope):
        if not found.group(2).startswith("ddp__"):
            report(line_of(scope, found.start()), "`%s` is static, so its name starts ddp__" % found.group(2))
    for found in re.finditer(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", code, re.M):
        if not found.group(1).startswith(("DDP", "ddp")):
            report(line_of(code, found.start()), "macro `%s` does not start DDP" % found.group(1))


def check_functions(code, report):
    code = re.sub(r'extern "[^"]*"\s*\{', lambda m: " " * len(m.group(0)), without_preprocessor(code))
    depth, start = 0, 0
    for found in re.finditer(r"[{}]", code):
        if found.group(0) == "{":
            if depth == 0:
                start = found.start()
            depth += 1
            continue
        depth = max(depth - 1, 0)
        lines = line_of(code, found.start()) - line_of(code, start) + 1
        if depth == 0 and lines > MAX_FUNCTION and code[:start].rstrip().endswith(")"):
            report(line_of(code, start), "a function of %d lines, allowed are %d" % (lines, MAX_FUNCTION))


def check_commas(code, report):
    """Reports comma operators outside `for` and macros: `a = 1, b = 2;`, `return a, b;`, `if (a = 1, b)`."""
    code = without_preprocessor(code)
    code = re.sub(r"<[\w\s,:*]*>", lambda m: re.sub(r"[^\n]", " ", m.group(0)), code)  # template arguments
    expression = re.compile(r"(else\s+)?(return\b|goto\b|[*(]?[\w.>\[\]()-]+\s*(([-+*/%|&^]|<<|>>)?=|\+\+|--))")
    begin = 0  # of the statement
    brackets = []  # each open one: 1 = a comma directly inside it is an operator
    for at, char in enumerate(code):
        before = code[begin:at].strip()
        if char in "([":
            brackets.append(re.search(r"\b(if|while|switch)$", before) is not None)
        elif char == "{" and (brackets or before.endswith("=") or "enum" in before.split()[:2]):
            brackets.append(False)  # an initialiser or an enum
        elif char in ")]}" and brackets:
            brackets.pop()
        elif char == "," and (brackets[-1] if brackets else expression.match(before)):
            report(line_of(code, at), "a comma operator: write two statements")
        elif char in "{};" and not brackets:
            begin = at + 1


def check_text(name, text, licence, report):
    lines = text.split("\n")
    if not text.endswith("\n"):
        report(len(lines), "no newline at the end of the file")
    for number, line in enumerate(lines, 1):
        if "\t" in line:
            report(number, "tab")
        if line != line.rstrip():
            report(number, "space at the end of the line")
        if len(line) > MAX_COLUMNS:
            report(number, "%d columns, allowed are %d" % (len(line), MAX_COLUMNS))
        if not line.isascii():
            report(number, "a character outside ASCII")
    last = text.rfind("/*")
    if normal(licence) not in normal(text[last:]):
        report(len(lines) - 1, "the file does not end with a comment that has the words of LICENSE")


def check_header(name, text, licence):
    """Every finding of one header, as (line, message)."""
    findings = []

    def report(line, message):
        findings.append((line, message))

    code = blank(text)
    check_opening(text, report)
    check_banners(text, report)
    check_first_api(text, code, report)
    check_calls(name, code, report)
    check_names(code, report)
    check_functions(code, report)
    check_commas(code, report)
    check_text(name, text, licence, report)
    return sorted(findings)


def nccl_flag():
    """Builds without NCCL where its header is not installed."""
    found = subprocess.run([os.environ["NVCC"], "-x", "cu", "-E", "-"], input="#include <nccl.h>\n", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           text=True)
    return ["-DDDP_NO_NCCL"] if found.returncode else []


def compile_program(root, work, stem, source, run):
    """Error text, or None when the program compiles (and, if run, ends with status 0)."""
    cuda = stem.endswith("cuh")
    path = os.path.join(work, stem + (".cu" if cuda else ".c"))
    program = os.path.join(work, stem)
    with open(path, "w") as file:
        file.write(source + "\n")
    if cuda:
        if not os.environ.get("NVCC"):
            return None
        # The bodies take nvcc long, and the cases of matrix.sh have them.
        bodies = ["-DDDP_IMPLEMENTATION_INCLUDED", "-DDDP_CUDA_IMPLEMENTATION_INCLUDED"]
        command = [os.environ["NVCC"], "-arch=compute_80", "-Xcompiler", "-Wall,-Wextra,-Werror", "-I", root, path, "-c", "-o", program, *bodies, *nccl_flag()]
    else:
        command = [os.environ.get("CC", "cc"), "-Wall", "-Wextra", "-Werror", "-I", root, path, "-o", program, "-lpthread", "-lm"]
    built = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if built.returncode:
        return "does not compile\n" + built.stdout
    if not run or cuda:
        return None
    try:
        ran = subprocess.run([program], cwd=work, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True, timeout=EXAMPLE_SECONDS)
    except subprocess.TimeoutExpired:
        return "still runs after %d s" % EXAMPLE_SECONDS
    return "ends with status %d\n%s" % (ran.returncode, ran.stdout) if ran.returncode else None


def readme_programs(text):
    """The ```c blocks of a markdown text that are whole programs, with their first lines."""
    blocks = re.finditer(r"^```c\n(.*?)^```", text, re.S | re.M)
    return [(line_of(text, block.start()) + 1, block.group(1)) for block in blocks if re.search(r"\bmain\s*\(", block.group(1))]


def check_examples(root, work, present):
    failures = []
    os.makedirs(work, exist_ok=True)
    for name in present:
        with open(os.path.join(root, name)) as file:
            example = example_of(file.read())
        error = compile_program(root, work, "example_" + name.replace(".", "_"), example, run=True) if example else "is missing"
        if error:
            failures.append("%s: EXAMPLE %s" % (name, error))
    readme = os.path.join(root, "README.md")
    if os.path.exists(readme):
        with open(readme) as file:
            for line, source in readme_programs(file.read()):
                error = compile_program(root, work, "readme_%d" % line, source, run=False)
                if error:
                    failures.append("README.md:%d: the program %s" % (line, error))
    return failures


def main(argv):
    root = argv[1]
    present = [name for name in HEADERS if os.path.exists(os.path.join(root, name))]
    strangers = [name for name in sorted(os.listdir(root)) if name.endswith((".h", ".cuh", ".c", ".cu")) and name not in HEADERS
                 and not name.startswith(".")]
    if "ddp.h" not in present:
        return "there is no ddp.h in " + root
    if len(argv) > 3 and argv[2] == "--examples":
        failures = check_examples(root, argv[3], present)
    else:
        failures = ["%s: the top level has only %s" % (name, ", ".join(HEADERS)) for name in strangers]
        with open(os.path.join(root, "LICENSE")) as file:
            licence = file.read()
        for name in present:
            with open(os.path.join(root, name), newline="") as file:
                text = file.read()
            failures += ["%s:%d: %s" % (name, line, message) for line, message in check_header(name, text, licence)]
    for failure in failures:
        print(failure)
    print("%d headers, %d findings" % (len(present), len(failures)))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

#!/usr/bin/env python3
"""Lists every error text of the headers in one table, and checks its wording.

    error_texts.py ROOT            a Markdown table on stdout, by header and section
    error_texts.py ROOT --tsv      the same, one text per line, with all public functions
    error_texts.py ROOT --literals every string literal of the headers and its kind: shows that no text is missing
    error_texts.py ROOT --check    prints one line per finding, exit status 1 if any

A text is each string literal that is not known to be something else (NO_TEXT_CALLS, NO_TEXT_SECTIONS, documents):
    error   the format of ddp_fail, ddp_fail_in, or a macro that calls them
    part    a part of an error text: an argument, a text that a function stores, or one that snprintf writes
    log     a text for the caller's log_fn
An error text is one sentence: place, cause; remedy. The place is `name=value`, a rank or a file. Remedies begin with
`use` (values), `set` (fields of a desc), `pass` (arguments), `call` (order of calls) or `give` (the same on all ranks).

The public functions come from a call graph of the headers. A call through a table (ddp_backend, ddp_device) leads to
every function at that position of a table. error_texts_selftest.py proves that each rule fires.
"""
import collections
import os
import re
import sys

from check_headers import HEADERS

# Functions that set the error text: the positions of format, result and call name. Macros are found from these.
SETTERS = {"ddp_fail": (1, 0, None), "ddp_fail_in": (3, 0, 1)}
# Functions that write a format into a buffer, and the position of the format.
WRITERS = {"snprintf": 2}
LOGS = ("ddp_group_log",)

# Calls whose literals are compared, opened, looked up or compiled.
NO_TEXT_CALLS = set(
    "asm __asm__ __volatile__ _Pragma target __has_include static_assert __builtin_cpu_supports __builtin_cpu_is strcmp "
    "strncmp strstr strchr strcspn strspn strpbrk strtok_r sscanf memcmp memchr memcpy strlen fopen open stat readlink "
    "glob prctl syscall strcpy".split())
# Topics of sections that write drawings, traces and printed tensors. Other documents are written by variadic functions.
NO_TEXT_SECTIONS = re.compile(r"drawing|tensors as text")
DIRECTIVE = re.compile(r"%[-+ #0]*(?:\*|\d+)?(?:\.(?:\*|\d+))?(?:hh|h|ll|l|z|j|t)?[diouxXeEfgGcsp%]")
TOKEN = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|[A-Za-z_]\w*|\d[\w.]*|->|##|\S", re.S)
BANNER = re.compile(r"^//== (.*?) =+ >>([a-z0-9-]+)$", re.M)

# One term per concept: the term of the table, and the words that it replaces.
TERMS = [
    ("use A to B", r"allowed are|numbered from 0|(ranks|indices) are 0 to|pass (0|1|a number|a positive)|are the most"),
    ("invalid", r"impossible|(is|are) wrong"),
    ("is not a", r"(is|are) (none|no)( of)?|none of (the|its)|is nothing that"),
    ("could not be allocated", r"out of memory|no memory|not to be had|could not be had|ran out"),
    ("space", r"rooms?|making room"),
    ("too small for", r"has room for"),
    ("set both, or neither", r"both or neither"),
    ("pending", r"under way|on (the|its) way"),
    ("closed the connection, exited, no longer exists", r"(is|are|was) gone|went away|hung up|has left|left the group"),
    ("destroyed the group", r"left (this|the) group"),
    ("timed out after", r"not (done|finished) after"),
    ("rank, slot", r"seat(s|ed)?"),
    ("agree", r"vote[sd]?|voting"),
    ("rendezvous", r"venues?|met|meets?|meeting"),
    ("message", r"letters?"),
    ("refuse, order", r"turn(s|ed)? (away|out)|turns?(?! (it )?o(n|ff)\b)"),
    ("report, set, return", r"told|tells?|telling|says?|said"),
    ("receive", r"hears?|heard"),
    ("unauthenticated peer", r"strangers?"),
    ("the rank, the process", r"who|whoever|whose ones?"),
    ("has rank", r"claims?"),
    ("only", r"alone"),
    ("again", r"anew"),
    ("the same", r"alike|likewise"),
    ("must", r"shall|(has|have) to( be)?"),
    ("N", r"(so|as|how) many"),
    ("is stored at, is outside", r"lies?|lying"),
    ("except", r"but for|other than by"),
    ("gap", r"holes?"),
    ("cannot be combined with", r"do(es)? not go with"),
    ("cycle", r"circles?"),
    ("name the subject", r"there (is|are|was|were)"),
    ("unshard", r"gathered"),
    ("full parameters", r"whole (ones|parameters?|values?)"),
    ("integer", r"whole numbers?"),
    ("floating-point dtype", r"floats?"),
    ("duplicate", r"(is|are) there twice"),
    ("truncated", r"cut short"),
    ("attached to a CUDA group", r"group of GPUs|one of GPUs"),
    ("device", r"GPU of its own"),
    ("timeout", r"time[- ]outs?"),
    ("timed out", r"timed-out"),
    ("micro-batch", r"micro ?batch(es)?"),
    ("dataset", r"data[ -]sets?"),
    ("all-reduce, all-gather, reduce-scatter", r"all ?reduce|all ?gather|reduce ?scatter"),
    ("checkpoint", r"check[ -]points?"),
    ("American spelling", r"\w*(initial|final|serial|synchron|normal|optim|util|recogn|quant|organ|author)is(e|ed|es|ing|ation)"),
    ("American spelling", r"colou?r|behaviou?r|neighbou?rs?(?<=our)|neighbours?"),
    ("folder", r"director(y|ies)"),
    ("workspace", r"work[ -]space"),
    ("warmup", r"warm[ -]up"),
    ("dimension", r"dims?"),
    ("cannot", r"can ?not(?<=n not)"),
    ("nonzero", r"non[- ]zero"),
    ("optimizer state", r"optimizer's state"),
]
# Pieces between %-directives that the word rules skip: C identifiers with an underscore, name=value, and quoted text.
IDENTIFIER = re.compile(r"\b\w*_\w+(\[\w*\])?(\.\w+)*|\b\w+(\[%\w+\])?(\.\w+)*=\S*|'[^' ]*'|`[^`]*`")

Token = collections.namedtuple("Token", "text line")
Macro = collections.namedtuple("Macro", "name params body line")
Unit = collections.namedtuple("Unit", "name params body line header section is_data type")
Row = collections.namedtuple("Row", "header section line function kind result text raw whole")


def tokens_of(text, line=1):
    """The tokens of a text whose first line is `line`, without comments."""
    out, last = [], 0
    for match in TOKEN.finditer(text):
        line += text.count("\n", last, match.start())
        last = match.start()
        if not match.group().startswith(("//", "/*")):
            out.append(Token(match.group(), line))
    return out


def is_string(token):
    return token.text.startswith('"')


def is_name(token):
    return bool(re.match(r"[A-Za-z_]\w*$", token.text))


def split_directives(text):
    """The text with preprocessor directives as empty lines, and its macros."""
    out, macros = [], []
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        if not lines[number].lstrip().startswith("#"):
            out.append(lines[number])
            number += 1
            continue
        start = number
        while lines[number].endswith("\\") and number + 1 < len(lines):
            number += 1
        number += 1
        out += [""] * (number - start)
        joined = "\n".join(line.rstrip("\\") for line in lines[start:number])
        found = re.match(r"\s*#\s*define\s+(\w+)(\(([^)]*)\))?(.*)", joined, re.S)
        if found:
            params = [p.strip() for p in found.group(3).split(",")] if found.group(2) else None
            line = start + 1 + joined.count("\n", 0, found.start(4))
            macros.append(Macro(found.group(1), params, tokens_of(found.group(4), line), line))
    return "\n".join(out), macros


def match_back(tokens, close):
    depth = 0
    for at in range(close, -1, -1):
        depth += {")": 1, "(": -1}.get(tokens[at].text, 0)
        if depth == 0:
            return at
    return 0


def arguments(tokens, opening):
    """The arguments of the call whose parenthesis is at `opening`, and the position after it."""
    args, depth, start = [], 0, opening + 1
    for at in range(opening, len(tokens)):
        text = tokens[at].text
        if text in "([{":
            depth += 1
        elif text in ")]}":
            depth -= 1
            if depth == 0:
                args.append(tokens[start:at])
                return (args if args != [[]] else []), at + 1
        elif text == "," and depth == 1:
            args.append(tokens[start:at])
            start = at + 1
    return args, len(tokens)


class Source:
    """The functions, data, macros and structs of one header."""

    def __init__(self, header, text):
        self.header, self.text = header, text
        self.banners = [(text.count("\n", 0, m.start()) + 1, m.group(2)) for m in BANNER.finditer(text)]
        self.no_text_sections = {m.group(2) for m in BANNER.finditer(text) if NO_TEXT_SECTIONS.match(m.group(1))}
        code, self.macros = split_directives(text)
        self.tokens = tokens_of(code)
        self.units, self.members, self.declared = [], {}, {}
        self.read()

    def section(self, line):
        return ([tag for at, tag in self.banners if at <= line] or ["-"])[-1]

    def read(self):
        tokens, depth, start, at = self.tokens, 0, 0, 0
        while at < len(tokens):
            text = tokens[at].text
            if text == "{" and at >= 2 and is_string(tokens[at - 1]) and tokens[at - 2].text == "extern":
                start = at + 1
            elif text == "{":
                end = self.block_end(at)
                self.block(start, at, end)
                at = end
                if tokens[start:at] and tokens[at].text == "}" and not self.continues(at):
                    start = at + 1
            elif text in (";", "}"):
                self.declaration(start, at)
                start = at + 1
            at += 1

    def block_end(self, at):
        depth = 0
        for end in range(at, len(self.tokens)):
            depth += {"{": 1, "}": -1}.get(self.tokens[end].text, 0)
            if depth == 0:
                return end
        raise SystemExit("%s:%d: a brace is not closed" % (self.header, self.tokens[at].line))

    def continues(self, at):
        """Whether a declarator follows the brace: } name; or } names[] = {"""
        following = self.tokens[at + 1] if at + 1 < len(self.tokens) else None
        return following is not None and (following.text in (";", "*") or (
            is_name(following) and self.tokens[at + 2].text in (";", "[", "=", ",")))

    def block(self, start, at, end):
        tokens, before = self.tokens, self.tokens[at - 1].text
        words = [token.text for token in tokens[start:at]]
        line = tokens[start].line
        close = at - 2 if is_name(tokens[at - 1]) and tokens[at - 2].text == ")" else at - 1  # a macro may follow
        if tokens[close].text == ")":
            opening = match_back(tokens, close)
            params = [[t.text for t in argument] for argument in arguments(tokens, opening)[0]]
            self.add(tokens[opening - 1].text, params, tokens[at:end + 1], line, False, None)
        elif before == "=":
            name = [t for t in tokens[start:at - 1] if is_name(t)]
            self.add(name[-1].text, [], tokens[at:end + 1], line, True, name[-2].text if len(name) > 1 else None)
        elif "struct" in words and is_name(tokens[at - 1]):
            self.members[before] = self.members_of(tokens[at + 1:end])
        elif "enum" not in words and "struct" not in words and "union" not in words and "namespace" not in words:
            self.add("?", [], tokens[at:end + 1], line, True, None)

    def add(self, name, params, body, line, is_data, type_name):
        self.units.append(Unit(name, params, body, line, self.header, self.section(line), is_data, type_name))

    def declaration(self, start, at):
        """A prototype or a single datum such as static const char *const name = "text"; """
        tokens = self.tokens[start:at]
        for i, token in enumerate(tokens):
            if token.text == "(" and i and is_name(tokens[i - 1]):
                name = tokens[i - 1].text
                if re.match(r"ddp_[a-z]", name):
                    self.declared.setdefault(name, self.section(tokens[i].line))
                break
            if token.text == "=":
                names = [t.text for t in tokens[:i] if is_name(t)]
                self.add(names[-1] if names else "?", [], tokens[i:], tokens[0].line, True, None)
                return

    @staticmethod
    def members_of(tokens):
        names, depth, last, pointer = [], 0, None, None
        for i, token in enumerate(tokens):
            if token.text in "({[":
                depth += 1
                if token.text == "(" and depth == 1 and tokens[i + 1].text == "*" and pointer is None:
                    pointer = tokens[i + 2].text
            elif token.text in ")}]":
                depth -= 1
            elif depth == 0 and token.text in (";", ","):
                names.append(pointer or last)
                pointer = None
            elif depth == 0 and is_name(token):
                last = token.text
        return names


class Program:
    """All headers together: setters, call graph and rows."""

    def __init__(self, texts):
        self.sources = [Source(name, text) for name, text in texts]
        self.macros = {m.name: m for s in self.sources for m in s.macros}
        self.strings = {name: m for name, m in self.macros.items()
                        if m.params is None and m.body and all(is_string(t) for t in m.body)}
        self.setters = self.find_setters()
        self.writers = dict(WRITERS)
        self.logs, self.documents = set(LOGS), set()
        for unit in self.units():
            if format_of(unit) is not None and unit.name not in self.setters:
                logs = any(name in LOGS for name, _, _ in calls_of(unit.body))
                self.writers[unit.name] = format_of(unit)
                (self.logs if logs else self.documents).add(unit.name)
        self.carriers = self.find_carriers()
        self.callers = self.find_callers()
        self.rows, self.literals = [], []
        for source in self.sources:
            self.read_source(source)
        for row in self.result_rows():
            self.rows.append(row)

    # --- functions that set the text ---

    def find_setters(self):
        """Adds the macros that pass one of their parameters on as the format of a setter."""
        setters, grew = dict(SETTERS), True
        for unit in self.units():
            form = format_of(unit)
            if form is not None and any(name in setters for name, _, _ in calls_of(unit.body)):
                names = [p[-1] if p else "" for p in unit.params]
                setters[unit.name] = (form, names.index("result") if "result" in names else self.code_in(unit), None)
        while grew:
            grew = False
            for macro in self.macros.values():
                if macro.name in setters or macro.params is None:
                    continue
                for name, args, _ in calls_of(macro.body):
                    if name in setters:
                        found = self.through_macro(macro, args, setters[name])
                        if found:
                            setters[macro.name], grew = found, True
                            break
        return setters

    @staticmethod
    def code_in(unit):
        """The result that a function of its own format passes on."""
        return " ".join(sorted({t.text for t in unit.body if re.match(r"DDP_ERR_\w+$", t.text)}))

    @staticmethod
    def through_macro(macro, args, setter):
        def position(index):
            """An argument as a parameter of the macro, or its fixed text."""
            if not isinstance(index, int):
                return index
            if index >= len(args):
                return len(macro.params) - 1 if macro.params[-1] == "..." else None
            for token in args[index]:
                if token.text in macro.params:
                    return macro.params.index(token.text)
                if token.text == "__VA_ARGS__":
                    return len(macro.params) - 1
            return " ".join(token.text for token in args[index])

        form = position(setter[0])
        return (form, position(setter[1]), position(setter[2])) if isinstance(form, int) else None

    def find_carriers(self):
        """Functions that put a const char * of theirs into an error text, with its position and the result."""
        carriers = {}
        for unit in self.units():
            texts = {p[-1]: i for i, p in enumerate(unit.params) if "char" in p and "*" in p}
            for name, args, _ in calls_of(unit.body):
                if name not in self.setters:
                    continue
                for argument in args[self.setters[name][0]:]:
                    for token in argument:
                        if token.text in texts:
                            carriers[(unit.name, texts[token.text])] = self.result_of(name, args)
        return carriers

    def units(self):
        return [unit for source in self.sources for unit in source.units]

    def result_of(self, setter, args):
        index = self.setters[setter][1]
        words = ([t.text for t in args[index]] if index < len(args) else []) if isinstance(index, int) \
            else (index or "").split()
        codes = [word for word in words if re.match(r"DDP_(ERR|OK)", word)]
        return " or ".join(codes) or ("variable" if words else "-")

    # --- who calls whom ---

    def find_callers(self):
        """For each function the public functions that can reach it."""
        macro_names, types = self.names_in_macros(), {}
        for source in self.sources:
            types.update(source.members)
        known = {unit.name for unit in self.units()}
        members, edges = self.pasted_members(known), collections.defaultdict(set)
        for unit in self.units():
            table_ends, starts = 0, self.tables_in(unit, types)
            for i, token in enumerate(unit.body):
                if i in starts:
                    values, table_ends = arguments(unit.body, i)
                    for value, name in zip(values, types[starts[i]]):
                        members[name].update(t.text for t in value if t.text in known)
                if i < table_ends or not is_name(token):
                    continue
                following = unit.body[i + 1].text if i + 1 < len(unit.body) else ""
                if i and unit.body[i - 1].text in ("->", "."):
                    if following == "(":
                        edges[unit.name].add("->" + token.text)
                    continue
                for name in {token.text} | macro_names.get(token.text, set()):
                    if name in known or name.startswith("->"):
                        edges[unit.name].add(name)
        public = {name for source in self.sources for name, section in source.declared.items()
                  if not section.startswith(("impl", "spi"))}
        spi = {name for source in self.sources for name, section in source.declared.items() if section == "spi"}
        callers = collections.defaultdict(set)
        for start in public | spi:
            seen, todo = set(), [start]
            while todo:
                name = todo.pop()
                if name in seen:
                    continue
                seen.add(name)
                todo += members.get(name[2:], ()) if name.startswith("->") else edges.get(name, ())
            for name in seen:
                callers[name].add(start)
        for name in callers:
            callers[name] = callers[name] & public or callers[name]
        return callers

    @staticmethod
    def tables_in(unit, types):
        """The braces that begin a table of functions, and the type of the table."""
        starts = {0: unit.type} if unit.is_data and unit.type in types else {}
        for i in range(3, len(unit.body)):
            if unit.body[i].text == "{" and unit.body[i - 1].text == "=" and unit.body[i - 3].text in types:
                starts[i] = unit.body[i - 3].text
        return starts

    def pasted_members(self, known):
        """Members of tables that a list of names fills: #define DDP_X(name, ...) prefix##name,"""
        members, macros = collections.defaultdict(set), [m for s in self.sources for m in s.macros]
        prefixes = {m.body[i - 1].text for m in macros for i, t in enumerate(m.body) if t.text == "##" and i}
        for macro in macros:
            if macro.params == ["X"]:
                for name in [args[0][0].text for call, args, _ in calls_of(macro.body) if call == "X" and args]:
                    members[name].update(prefix + name for prefix in prefixes if prefix + name in known)
        return members

    def names_in_macros(self):
        """The names in a macro, also those of the macros that it uses."""
        direct = collections.defaultdict(set)
        for macro in [m for source in self.sources for m in source.macros]:
            if macro.params == ["X"]:
                continue  # a list of names: it calls nothing
            direct[macro.name] |= {t.text if not i or macro.body[i - 1].text not in ("->", ".") else "->" + t.text
                                   for i, t in enumerate(macro.body) if is_name(t)}
        grew = True
        while grew:
            grew = False
            for names in direct.values():
                more = set().union(*[direct[n] for n in names if n in direct]) - names if names & set(direct) else set()
                if more:
                    names |= more
                    grew = True
        return direct

    # --- literals and rows ---

    def read_source(self, source):
        for macro in source.macros:
            self.read_body(source, "#define " + macro.name, macro.body)
        for unit in source.units:
            self.read_body(source, unit.name, unit.body)

    def read_body(self, source, shown, body):
        """Adds a row for each literal of a body that may be a text."""
        owners, groups = call_owners(body), literal_groups(body, self.strings)
        inlined = set()
        for first, last in groups:
            if first in inlined:
                continue
            raw = "".join(self.piece(token) for token in body[first:last])
            kind, result, args = self.classify(source, source.section(body[first].line), owners[first], body, first, raw)
            self.literals.append((source.header, body[first].line, shown, kind, raw))
            if kind not in ("error", "part", "log"):
                continue
            text = raw
            if args is not None:
                text = self.fill(raw, args)
                for at, end in groups:
                    if any(body[at] is inner for argument in args for inner in argument):
                        inlined.add(at)
                        word = "".join(self.piece(token) for token in body[at:end])
                        self.literals.append((source.header, body[at].line, shown, "argument", word))
                        raw += "\n" + word if re.search(r"[a-z]{2}", word) and not self.is_code(owners[at]) else ""
            self.rows.append(Row(source.header, source.section(body[first].line), body[first].line, shown, kind, result,
                                 text, raw, kind == "error" and self.is_whole(owners[first], shown)))

    def is_whole(self, owner, shown):
        """Whether the text is all of an error line: not if a macro adds words to it, nor in such a macro."""
        macro = self.macros.get(owner[-1][0])
        return not shown.startswith("#define") and not (macro and macro.name in self.setters and any(
            is_string(t) and re.search(r"[a-z]{2,} [a-z]", t.text) for t in macro.body))

    def piece(self, token):
        if is_string(token):
            return re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m.group(1), m.group(0) if m.group(1) in "x0123" else m.group(1)),
                          token.text[1:-1])
        if token.text in self.strings:
            return "".join(self.piece(inner) for inner in self.strings[token.text].body)
        return "<%s>" % token.text

    @staticmethod
    def is_code(owner):
        return any(name in NO_TEXT_CALLS for name, _, _ in owner)

    def classify(self, source, section, owner, body, first, raw):
        """Kind of a literal, the result it goes with, and the arguments of its format."""
        name, index, opening = owner[-1] if owner else (None, 0, 0)
        if self.is_code(owner):
            return "code", "-", None
        document = section in source.no_text_sections or any(n in self.documents for n, _, _ in owner)
        if document and not any(n in self.setters for n, _, _ in owner):
            return "document", "-", None
        args = arguments(body, opening)[0] if owner else []
        if name in self.setters and index == self.setters[name][0]:
            return "error", self.result_of(name, args), args[index + 1:]
        if not re.search(r"[A-Za-z]{2}", DIRECTIVE.sub("", raw)):
            return "marks", "-", None
        for n, i, _ in reversed(owner):
            if (n, i) in self.carriers and " " in raw:
                return "part", self.carriers[(n, i)], None
        if name in self.writers and index == self.writers[name]:
            kind = "log" if name in self.logs else "part"
            return kind, "-", args[index + 1:]
        if name in self.logs:
            return "log", "-", None
        if " " not in raw:
            return "name", "-", None
        if re.match(r'\{?"\w+": ', raw):
            return "document", "-", None  # JSON
        return "part", "-", None

    def fill(self, raw, args):
        """The text with each directive replaced by its argument in braces."""
        args = list(args)

        def shown(match):
            directive = match.group()
            if directive == "%%":
                return "%"
            for _ in range(directive.count("*")):
                if args:
                    args.pop(0)
            if not args:
                return directive
            argument = args.pop(0)
            words = [self.piece(t) for t in argument if is_string(t)]
            if any(words) and argument[0].text != "ddp_public_call_name":
                return "{" + "|".join(words) + "}"
            return "{" + code_of(argument) + "}"

        return DIRECTIVE.sub(shown, raw)

    def result_rows(self):
        """The descriptions of ddp_result, which ddp.h lists in DDP_RESULTS."""
        macro = self.macros.get("DDP_RESULTS")
        rows = []
        for name, args, _ in calls_of(macro.body) if macro else []:
            if name == "X" and len(args) == 3 and len(args[2]) == 1:
                raw = self.piece(args[2][0])
                rows.append(Row("ddp.h", "types", args[2][0].line, "DDP_RESULTS", "result", args[0][0].text, raw, raw, True))
        self.rows = [row for row in self.rows if row.function != "#define DDP_RESULTS"]
        return rows


def code_of(tokens):
    text = re.sub(r" ?(->|\.|\[|\]|\(|\)|,) ?", r"\1", " ".join(t.text for t in tokens))
    text = re.sub(r"\((?:unsigned )?(?:long long|int|size_t|void\*?|double|void \*)\)", "", text)
    return text if len(text) < 60 else text[:57] + "..."


def format_of(unit):
    """The position of the format of a variadic function, or None."""
    at = len(unit.params) - 2
    return at if at >= 0 and unit.params[-1] == [".", ".", "."] and "char" in unit.params[at] else None


def calls_of(tokens):
    """(name, arguments, position) of every call in a body."""
    for at in range(len(tokens) - 1):
        if is_name(tokens[at]) and tokens[at + 1].text == "(":
            yield tokens[at].text, arguments(tokens, at + 1)[0], at


def call_owners(body):
    """For each token the calls around it: (name, index of the argument, position of the parenthesis)."""
    owners, stack = [], []
    for at, token in enumerate(body):
        if token.text == ")" and stack:
            stack.pop()
        owners.append([tuple(entry) for entry in stack if entry[0] not in ("if", "while", "for", "return", "(", "DDP_TRY")])
        if token.text == "(":
            named = at and is_name(body[at - 1])
            stack.append([body[at - 1].text if named else "(", 0, at])
        elif token.text == "," and stack and not in_braces(body, stack[-1][2], at):
            stack[-1][1] += 1
    return owners


def in_braces(body, opening, at):
    depth = 0
    for token in body[opening:at]:
        depth += {"{": 1, "}": -1}.get(token.text, 0)
    return depth > 0


def literal_groups(body, strings):
    """Ranges of adjacent literals, with the string macros and macro parameters among them."""
    groups, at = [], 0
    while at < len(body):
        if not is_string(body[at]) and body[at].text not in strings:
            at += 1
            continue
        end = at + 1
        while end < len(body) and (is_string(body[end]) or body[end].text in strings or (
                is_name(body[end]) and body[end - 1].text[0] == '"' and body[end].text not in ("else", "while"))):
            end += 1
        groups.append((at, end))
        at = end
    return groups


# --- checks ---


def plain_words(text):
    """The text without directives, identifiers and quotes: what the word rules read."""
    return IDENTIFIER.sub(" ", DIRECTIVE.sub("%d", text)).replace("%d", "0")


def check_row(row):
    """Findings of one row."""
    found = []
    for number, text in enumerate(row.raw.split("\n")):
        plain = plain_words(text)
        for term, rejected in TERMS:
            for match in re.finditer(r"(?<![\w-])(?:%s)(?![\w-])" % rejected, plain):
                found.append("`%s`: the term is `%s`" % (match.group(), term))
        if re.search(r"[.!]\s*$", text) and not text.endswith("..."):
            found.append("a full stop at the end")
        if re.search(r"[.!?] +\S", text.replace("...", "")):
            found.append("more than one sentence")
        if number == 0 and row.whole and row.result != "DDP_OK":
            words = re.findall(r"[A-Za-z]{2,}", DIRECTIVE.sub(" ", IDENTIFIER.sub(" ", text)))
            if len(words) < 2 and "s" not in [d[-1] for d in DIRECTIVE.findall(text)]:
                found.append("no cause: fewer than two words")
            if re.match(r"[A-Z][a-z]+ ", text):
                found.append("a capital at the start")
    return found


def check_names(literals):
    """Rejected terms among the arguments of one word."""
    return [(header, line, "`%s`: the term is `%s`" % (raw, term)) for header, line, _, kind, raw in literals
            for term, rejected in TERMS if kind == "name" and re.fullmatch(rejected, raw) and "param" not in raw]


def check_breaks(literals):
    return [(header, line, "a line break in `%s`" % raw.strip()) for header, line, _, kind, raw in literals
            if kind in ("error", "part", "log") and "\n" in raw]


def check_variants(rows):
    """Two spellings of one word in the whole table: with and without a hyphen or a blank."""
    joined, found = collections.defaultdict(lambda: collections.defaultdict(list)), []
    for row in rows:
        words = re.findall(r"[a-z]+(?:-[a-z]+)*", plain_words(row.raw))
        for word in words:
            joined[word.replace("-", "")][word].append(row)
        if "-" in "".join(words):
            continue
    hyphened = {word.replace("-", ""): word for spellings in joined.values() for word in spellings if "-" in word}
    for key, word in hyphened.items():
        spaced = re.compile(r"(?<![\w-])%s(?![\w-])" % word.replace("-", " "))
        for row in rows:
            if spaced.search(plain_words(row.raw)):
                joined[key][word.replace("-", " ")].append(row)
    for spellings in joined.values():
        if len(spellings) > 1:
            rare = min(spellings, key=lambda word: len(spellings[word]))
            row = spellings[rare][0]
            found.append((row.header, row.line, "two spellings of one word: " + ", ".join("`%s`" % s for s in sorted(spellings))))
    return found


def check(program):
    found = [(row.header, row.line, "%s: %s" % (message, row.raw.split("\n")[0])) for row in program.rows
             for message in check_row(row)]
    found += check_names(program.literals) + check_breaks(program.literals)
    found += check_variants(program.rows)
    if not any(name in SETTERS for unit in program.units() for name, _, _ in calls_of(unit.body)):
        found.append(("ddp.h", 1, "no setter of error texts found"))
    return sorted(set(found))


# --- output ---


def reached_by(program, row, all_of_them):
    names = sorted(program.callers.get(row.function, ()))
    if row.kind == "result":
        return "-"
    if row.function.startswith("#define"):
        return "users of the macro"
    if all_of_them or len(names) < 4:
        return ", ".join(names) or "callbacks of the caller"
    return "%d functions, such as %s" % (len(names), names[0])


def table(program):
    last = None
    for row in program.rows:
        if (row.header, row.section) != last:
            last = (row.header, row.section)
            print("\n## %s >>%s\n\n| line | function | reached by | result | kind | text |\n|---|---|---|---|---|---|" % last)
        print("| %d | %s | %s | %s | %s | %s |" % (row.line, row.function, reached_by(program, row, False), row.result, row.kind,
                                                   row.text.replace("|", "\\|").replace("\n", "\\n")))


def read_headers(root):
    texts = []
    for name in HEADERS:
        if os.path.exists(os.path.join(root, name)):
            with open(os.path.join(root, name)) as file:
                texts.append((name, file.read()))
    return texts


def main(argv):
    program = Program(read_headers(argv[1]))
    order = {name: i for i, name in enumerate(HEADERS)}
    program.rows.sort(key=lambda row: (order.get(row.header, 9), row.line))
    if "--check" in argv:
        found = check(program)
        for header, line, message in found:
            print("%s:%d: %s" % (header, line, message))
        print("%d error texts, %d parts of texts, %d findings" % (
            sum(row.kind == "error" for row in program.rows), sum(row.kind != "error" for row in program.rows), len(found)))
        return 1 if found else 0
    if "--literals" in argv:
        for literal in sorted(program.literals, key=lambda l: (order.get(l[0], 9), l[1])):
            print("%s:%d\t%s\t%s\t%r" % literal)
    elif "--tsv" in argv:
        for row in program.rows:
            print("\t".join([row.header, row.section, str(row.line), row.function, reached_by(program, row, True), row.result,
                             row.kind, row.text.replace("\n", "\\n")]))
    else:
        table(program)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

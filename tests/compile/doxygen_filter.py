"""Doxygen's INPUT_FILTER: prints a header with its comments as documentation, without moving declarations."""
import re, sys
NAME = sys.argv[1].split("/")[-1]
COMMENT = (r"(?m)^(?://==|/\* ---) (.*?) (?:=+ >>\S+(?!\n/\*)|(?:---|=+ >>\S+)((?s:.*?))\*/)$" # a topic
           r"|^(?!#)(.*?)/\*((?s:(?!\*/).)*)\*/( *\\?)$") # or code, text, rest
TABLE = r"(?m)^(?: {5}|.*\S {3}).*(?:\n+(?: {5}|.*\S {3}).*)*$" # lines that are indented or have columns
SECTION = r"(?m)^(?=(?: {4}.*\n+)*? {4}(?: |.*\S {3})) {4}.*(?:\n+ {4}.*)*$" # one that has such lines
RULES = [(r'("[^"\n]*")|([\\@<>&#%$])', lambda m: m[1] or "\\" + m[2]), # these start Doxygen's commands
         (r"(?m)`([^`\n]+)`|^( *)(\*\w+|//)", r"\2<tt>\1\3</tt>"), # or they vanish
         (r"(?<![\w.])((?:ddp|DDP_ERR)_\w+)(?!\w|\*|\(\w|\.c?u?h\b)", r"#\1"), # a link; unknown names fail
         (r"(?m)((?<=[^A-Z\n]\n {4})|(?<=\. ))(Errors\b|[A-Z]\w+( \w+)?:(?= ))(?!.* {3})", r"<br><b>\2</b>"),
         (r"(?m)^[A-Z][A-Z ]+[A-Z]\b.*$", r"<h3>\g<0></h3>")]
def document(text, indent=3, verbatim=TABLE):
    rules = [(r"(?m)^ {1,%d}" % indent, "    "), *RULES, (verbatim, r'<pre class="fragment">\g<0></pre>')]
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text
def page(alias, title, text): # alias: see Doxyfile
    return "/** @%s{%s,%s,%s}%s*/" % (alias, re.sub(r"\W+", "_", title), title, NAME.replace(".", "_"), text)
def show(match): # the opening comment, a banner, or a comment with the code before it
    topic, about, code, text, rest = match.groups("")
    if match.start() == 0: return "/** @file */" + page("header", NAME, document(text, 4, SECTION))
    if topic: return "/** @} */" + page("topic", NAME + ": " + topic, document(about.replace("/*", "  ")))
    if not code: return "/**" + document(text) + "*/" + rest
    doc = "/*! @brief " + document(" " + " ".join(text.split())) + "*/ "
    kind = re.fullmatch(r" +(\w[\w ]* )[^(=]+, [^(=]+; *", code) # of several fields: each gets the comment
    return doc + code.replace(", ", "; " + doc + kind[1] if kind else ", ") + rest + "\n" * text.count("\n")
source = re.sub(COMMENT, show, open(sys.argv[1]).read())
source = re.sub(r'(?m)^    X\((\w+, [^"(]*("[^"]*")\))', r"    /** \2 */ X(\1", source) # values of an enum
print(source.replace("(DDP_X)\n", "(DDP_X) /**/\n"), "/** @} */") # or lines vanish

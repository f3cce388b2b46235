"""The tcp and mpi backends of ddp.h are written like a user's own: they use >>spi and no private symbol of ddp.h.

    check_backends.py ROOT

tcp shares connections, frames and the rendezvous with >>impl-rendezvous and the sections after it. mpi shares nothing:
its sections compile as a source file of their own that includes ddp.h without an implementation (MPI_FLAGS: where MPI is).
"""
import os
import re
import subprocess
import sys
import tempfile

BACKENDS = {
    "tcp": ["impl-tcp", "impl-tcp-calls", "impl-tcp-groups"],
    "mpi": ["impl-mpi", "impl-mpi-transfer", "impl-mpi-calls", "impl-mpi-groups"],
}
SHARED = {
    "tcp": ["impl-rendezvous", "impl-frames", "impl-secret", "impl-address", "impl-address-list", "impl-rank0", "impl-connect"],
    "mpi": [],
}
PRIVATE = re.compile(r"\b(?:ddp__|DDP__)\w+")
DEFINED = (
    r"^(?:static|DDPDEF|DDP__FORCED_INLINE)\b[^;={}]*?\b((?:ddp__|DDP__)\w+)\s*\(",
    r"^#\s*define\s+((?:ddp__|DDP__)\w+)",
    r"^\s*typedef\b[^;{]*?\b(ddp__\w+)\s*(?:\[[^]]*\])?[;{]",
    r"^\}\s*((?:ddp__)\w+);",
    r"^static\b[^(;={]*?\b((?:ddp__|DDP__)\w+)\s*(?:\[[^]]*\])?\s*[;=]",
)
SYSTEM = "errno netinet/in netinet/tcp pthread sched stdio stdlib string sys/socket unistd".split()


def sections(text):
    parts = re.split(r"^//==.*>>([\w-]+)$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def bare(text):
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    return re.sub(r'"(\\.|[^"\\\n])*"', '""', text)


def defined(text):
    names = set()
    for pattern in DEFINED:
        names.update(re.findall(pattern, text, flags=re.M))
    for body in re.findall(r"\benum\b[^{;]*\{([^}]*)\}", text):
        names.update(PRIVATE.findall(body))
    return names


def check(text):
    found = []
    parts = {name: bare(part) for name, part in sections(text).items()}
    for name, own in BACKENDS.items():
        text = "\n".join(parts[part] for part in own)
        known = defined(text + "\n".join(parts[part] for part in SHARED[name]))
        for symbol in sorted(set(PRIVATE.findall(text)) - known):
            found.append(f"{name} uses {symbol}, which >>spi does not offer")
        for access in sorted(set(re.findall(r"\b(?:group|parent|child|local|control)->\w+", text))):
            found.append(f"{name} looks into a group: {access}")
    return found


def compile_alone(root, text, flags):
    includes = "".join(f"#include <{name}.h>\n" for name in SYSTEM)
    source = '#define DDP_USE_MPI\n#include "ddp.h"\n' + includes
    source += "".join(sections(text)[part] for part in BACKENDS["mpi"])
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "mpi_backend.c")
        with open(path, "w") as f:
            f.write(source)
        command = [os.environ.get("CC") or "cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I", root, "-fsyntax-only"]
        return subprocess.run(command + flags.split() + [path], capture_output=True, text=True)


def main(argv):
    root = argv[1]
    with open(os.path.join(root, "ddp.h")) as f:
        text = f.read()
    # a section that looks inside must be found
    broken = text.replace("static void ddp__tcp_send_failure(", "static int ddp__peek(ddp_group *group) { return group->rank + ddp__has_op(0); }\nstatic void ddp__tcp_send_failure(", 1)
    if len(check(broken)) < len(check(text)) + 2:
        print("check_backends.py does not notice a backend that looks inside")
        return 1
    found = check(text)
    flags = os.environ.get("MPI_FLAGS", "")
    if flags:
        run = compile_alone(root, text, flags)
        if run.returncode:
            found.append("mpi does not compile alone:\n" + run.stderr)
    print("\n".join(found) if found else f"tcp and mpi use >>spi only{'' if flags else '; without MPI: not compiled'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

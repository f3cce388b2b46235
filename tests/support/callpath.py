"""callpath.py - counts the functions between a public call and a function that it leads to, at -O0.

    python3 callpath.py PROGRAM MAX CALL TARGET [ARGS...]

Runs PROGRAM with ARGS under gdb. Fails when the path from CALL to TARGET has more than MAX functions, both included,
or when TARGET is not reached. Exits with 77 where gdb is missing or may not trace. Prints the path.

PROGRAM runs its ranks as threads. It calls its own function callpath_start() when its setup is done, after a barrier.
The path is the one of the first call of TARGET after the first call of CALL after that. Two kinds of path:
    in place   the caller's thread reaches TARGET inside CALL
    queued     a communication thread ("ddp-comm") reaches TARGET. Its functions, from the thread's main function on,
               count together with those of the caller, from CALL to the one that wakes the communication thread.
"""
import os
import re
import shutil
import subprocess
import sys

try:
    import gdb
except ImportError:
    gdb = None


def names(until):
    """The functions on this thread's stack, innermost first, without those of libc, up to `until` or its first one."""
    found = []
    frame = gdb.newest_frame()
    while frame is not None:
        name = frame.name() or "?"
        if name in ("start_thread", "clone3", "__clone", "clone", "__clone3", "main"):
            break
        found.append(name)
        if name == until:
            return found, True
        frame = frame.older()
    return found, False


def watch(call, target):
    """Inside gdb: runs to CALL, then to TARGET, and prints the path."""
    for setting in ("pagination off", "confirm off", "debuginfod enabled off", "breakpoint pending on",
                    "print thread-events off", "demangle-style none"):
        try:
            gdb.execute("set " + setting)
        except gdb.error:
            pass  # older versions know no debuginfod
    try:
        gdb.Breakpoint("callpath_start", temporary=True)
        gdb.execute("run", to_string=True)
    except gdb.error as error:
        print("callpath: cannot trace: %s" % error)
        return
    if gdb.selected_thread() is not None:
        gdb.Breakpoint(call, temporary=True)
        gdb.execute("continue", to_string=True)
    if gdb.selected_thread() is None:
        print("callpath: %s was not called after callpath_start" % call)
        return
    goal = gdb.Breakpoint(target)
    wake = gdb.Breakpoint("pthread_cond_signal")
    caller = None  # from the first function that wakes a communication thread to CALL
    communication = None
    hits = 0
    for _ in range(100000):
        inner, inside = names(call)
        if goal.hit_count > hits:
            hits = goal.hit_count
            inner[0] = target  # libc's own names differ
            if inside:
                print("callpath: path %s" % " ".join(reversed(inner)))
                return
            if communication is None and gdb.selected_thread().name == "ddp-comm":
                communication = inner
        elif inside and caller is None and inner[0] != call:
            while inner and not inner[0].startswith("ddp"):
                inner = inner[1:]
            caller = inner
            wake.enabled = False
        if caller is not None and communication is not None:
            print("callpath: path %s | %s" % (" ".join(reversed(caller)), " ".join(reversed(communication))))
            return
        gdb.execute("continue", to_string=True)
        if gdb.selected_thread() is None:
            break
    print("callpath: %s was not reached from %s" % (target, call))


def main():
    program, limit, call, target = sys.argv[1:5]
    if shutil.which("gdb") is None:
        print("skipped: there is no gdb")
        return 77
    command = ["gdb", "-batch", "-nx", "-ex", "set startup-with-shell off", "-x", os.path.abspath(__file__), "--args",
               program] + sys.argv[5:]
    environment = dict(os.environ, DDP_CALLPATH=call + " " + target, PYTHONDONTWRITEBYTECODE="1")
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                         timeout=100, check=False)
    if re.search("ptrace.*(not permitted|denied)|Cannot trace|Could not trace", run.stdout, re.I):
        print("skipped: gdb may not trace here\n" + run.stdout)
        return 77
    path = re.search("^callpath: path (.*)$", run.stdout, re.M)
    if not path:
        print(run.stdout)
        return 1
    functions = path.group(1).replace("|", " ").split()
    print("%d functions, at most %s: %s" % (len(functions), limit, path.group(1)))
    return 0 if len(functions) <= int(limit) else 1


if gdb is not None:
    watch(*os.environ["DDP_CALLPATH"].split())
elif __name__ == "__main__":
    sys.exit(main())

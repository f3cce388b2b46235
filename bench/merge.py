"""Makes the tables of a run: python3 merge.py FOLDER [PAGE]

Reads collectives.csv in FOLDER, prints the tables, and writes collectives.md and all_reduce.dat (for plot.gp)
there. With PAGE, the tables also replace the part of that page between <!-- measured NAME --> and <!-- end
NAME -->, where NAME is the name of the folder.

The CSV file has one line per block: repetitions of one operation at one size.
Ratio: each ddp block is compared with the peer's block of the same operation, size, ranks and placement that
is nearest in time, at most 60 s away. The reported ratio is the median. For each size and placement, the
peer's fastest setting counts. Blocks whose two ping-pongs disagree (one near, one far) are dropped.

Targets: REQUIRED. Where the bare loops do not reach a target, it is restated as BARE_SHARE of the bare loops,
unless ddp is clearly faster than these loops: then they show no limit.
"""
import collections
import csv
import os
import statistics
import sys

KIB, MIB = 1024, 1024 * 1024
SIZES = [KIB, 16 * KIB, 256 * KIB, MIB, 25 * MIB, 64 * MIB, 256 * MIB]
PLACES = ["near", "far"]
LARGE = 25 * MIB
# (operation, memory, ranks, bytes, peer) -> target: how many times faster than the peer
REQUIRED = {}
for memory, row in {"group": [2, 5, 8, 6, 4.5, 2.4, 2.1], "private": [2, 4.5, 3, 2, 2.2, 1.6, 1.5]}.items():
    for size, ratio in zip(SIZES, row):
        REQUIRED["all_reduce", memory, 2, size, "openmpi"] = ratio
for memory, gloo, scatter, gather, four in [("group", 10, 12, 1.6, 5), ("private", 5, 6, 1.3, 2)]:
    REQUIRED["all_reduce", memory, 2, LARGE, "gloo"] = gloo
    REQUIRED["reduce_scatter", memory, 2, LARGE, "openmpi"] = scatter
    REQUIRED["reduce_scatter_in_place", memory, 2, LARGE, "openmpi"] = scatter
    REQUIRED["all_gather", memory, 2, LARGE, "openmpi"] = gather
    REQUIRED["all_reduce", memory, 4, LARGE, "openmpi"] = four
BARE_SHARE = 0.95  # the restated target
NO_LIMIT = 1.05  # from this share on, the bare loops show no limit
BARRIER_US = {"near": 0.25, "far": 0.6}
BOUND_SHARE = {("group", "near"): 0.8, ("group", "far"): 0.8, ("private", "near"): 0.4, ("private", "far"): 0.3}
SETTINGS = {"stock": "default", "ring": "ring in 1 MiB segments", "eager": "recursive doubling, eager limit 64 KiB",
            "sm": "coll/sm", "halving": "halving and doubling", "yield": "yielding", "spin": "spinning",
            "slots-8": "8 KiB slots", "slots-128": "128 KiB slots", "slots-256": "256 KiB slots", "slots-512": "512 KiB slots",
            "line-64": "64 KiB slots, line by line", "line-128": "128 KiB slots, line by line",
            "read": "process_vm_readv", "-": "in place"}

Block = collections.namedtuple("Block", "system setting op memory ranks bytes time tag us preempted")


def read(path):
    """All blocks except the mixed ones, and the number of mixed ones."""
    blocks, mixed = [], 0
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            if row["tag"] == "mixed":
                mixed += 1
                continue
            blocks.append(Block(row["system"], row["setting"], row["op"], row["memory"], int(row["ranks"]),
                                int(row["bytes"]), float(row["time_s"]), row["tag"], float(row["median_us"]),
                                int(row["preempted"])))
    return blocks, mixed


def median_us(blocks):
    return statistics.median(b.us for b in blocks)


def fastest(blocks):
    """The blocks of the setting with the lowest median."""
    by_setting = {}
    for b in blocks:
        by_setting.setdefault(b.setting, []).append(b)
    return min(by_setting.values(), key=median_us, default=[])


def median_ratio(blocks, others):
    """Median over blocks of: time of the nearest other block / time of the block. None without a pair within
    60 s."""
    ratios = []
    for block in blocks:
        nearest = min(others, key=lambda other: abs(other.time - block.time), default=None)
        if nearest and abs(nearest.time - block.time) <= 60:
            ratios.append(nearest.us / block.us)
    return statistics.median(ratios) if ratios else None


class Results:
    """Blocks by system (ddp, memory, or a peer), operation, ranks, bytes and placement. The bare loops are
    "memory"."""

    def __init__(self, blocks):
        self.by_key = {}
        for b in blocks:
            self.by_key.setdefault((b.system, b.op, b.ranks, b.bytes, b.tag), []).append(b)

    def get(self, *key):
        return self.by_key.get(key, [])

    def ddp(self, op, memory, ranks, size, tag):
        return [b for b in self.get("ddp", op, ranks, size, tag) if b.memory == memory]

    def peer(self, system, op, ranks, size, tag, setting=None):
        """Blocks of the peer's fastest setting, or of the given setting."""
        return fastest(b for b in self.get(system, op, ranks, size, tag) if setting in (None, b.setting))

    def ratio(self, op, memory, ranks, size, tag, peer, setting=None):
        """How many times faster than the peer. None if one of the two was not measured."""
        return median_ratio(self.ddp(op, memory, ranks, size, tag), self.peer(peer, op, ranks, size, tag, setting))

    def bare_loops(self, op, memory, ranks, size, tag):
        """Blocks of the fastest bare loops over this kind of memory."""
        return fastest(b for b in self.get("memory", op, ranks, size, tag) if b.memory == memory)

    def bare_ratio(self, op, memory, ranks, size, tag, peer):
        """How many times faster than the peer the bare loops are. None if not measured."""
        peer_blocks, bare = self.peer(peer, op, ranks, size, tag), self.bare_loops(op, memory, ranks, size, tag)
        return median_us(peer_blocks) / median_us(bare) if peer_blocks and bare else None

    def bare_share(self, op, memory, ranks, size, tag):
        """Speed of ddp as a share of the speed of the bare loops. None if not measured."""
        return median_ratio(self.ddp(op, memory, ranks, size, tag), self.bare_loops(op, memory, ranks, size, tag))


def size_name(size):
    return "%d MiB" % (size // MIB) if size >= MIB else "%d KiB" % (size // KIB) if size else ""


def number(value):
    return "%.0f" % value if value >= 1000 else "%.3g" % value


def percent(share):
    return "%.0f%%" % (100 * share) if share is not None else ""


def table(title, head, rows):
    if not rows:
        return []
    lines = [title, "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows] + [""]


class Verdict:
    """A ratio, its target on this machine, and whether the target is missed."""

    def __init__(self, results, op, memory, ranks, size, tag, peer):
        key = (op, memory, ranks, size, tag)
        self.key, self.peer = key, peer
        self.ratio = results.ratio(*key, peer)
        self.required = REQUIRED.get((op, memory, ranks, size, peer))
        self.share, self.restated, self.missed = None, False, False
        if not self.ratio or not self.required:
            return
        self.missed = self.ratio < self.required
        if peer != "openmpi":
            return
        bare = results.bare_ratio(*key, peer)
        self.share = results.bare_share(*key)
        if self.missed and bare is not None and self.share is not None:
            self.restated = bare < self.required and self.share < NO_LIMIT
        if self.restated:
            self.missed = self.share < BARE_SHARE

    def cell(self):
        if not self.ratio:
            return "-"
        if self.missed:
            return "**%.2f**" % self.ratio
        return "%.2f" % self.ratio if self.ratio < 10 else "%.1f" % self.ratio

    def target(self):
        if not self.ratio or not self.required:
            return ""
        return "%s of bare loops" % percent(BARE_SHARE) if self.restated else "%g" % self.required


def all_reduce_ratios(results, verdicts):
    """Per kind of memory: the targets, then the ratios of each placement."""
    rows = []
    for memory in ["group", "private"]:
        measured = []
        for tag in PLACES:
            keys = [("all_reduce", memory, 2, size, tag) for size in SIZES]
            row = [Verdict(results, *key, "openmpi") for key in keys]
            if not any(v.ratio for v in row):
                continue
            verdicts += row
            measured.append([memory, tag] + [v.cell() + (" (r)" if v.restated else "") for v in row])
            bare = [results.bare_ratio(*key, "openmpi") for key in keys]
            if not any(bare):
                continue
            measured.append([memory, tag + ", bare loops"] + ["%.3g" % ratio if ratio else "" for ratio in bare])
            shares = [percent(results.bare_share(*key)) for key in keys]
            measured.append([memory, tag + ", share of bare loops"] + shares)
        if measured:
            target = ["%g" % REQUIRED["all_reduce", memory, 2, size, "openmpi"] for size in SIZES]
            rows += [[memory, "target"] + target] + measured
    return table("All-reduce of f32, 2 ranks: times faster than Open MPI in its fastest setting",
                 ["memory", "cores"] + [size_name(size) for size in SIZES], rows)


def all_ratios(results, verdicts):
    rows = []
    keys = [("all_reduce", 2, LARGE), ("reduce_scatter", 2, LARGE), ("reduce_scatter_in_place", 2, LARGE),
            ("all_gather", 2, LARGE), ("broadcast", 2, LARGE), ("send_recv", 2, KIB), ("send_recv", 2, LARGE),
            ("barrier", 2, 0), ("all_reduce", 4, KIB), ("all_reduce", 4, 256 * KIB), ("all_reduce", 4, LARGE),
            ("barrier", 4, 0)]
    for op, ranks, size in keys:
        for memory in ["group", "private"]:
            for tag in PLACES:
                key = (op, memory, ranks, size, tag)
                openmpi, mpich, gloo = [Verdict(results, *key, peer) for peer in ["openmpi", "mpich", "gloo"]]
                bare, loops = results.bare_ratio(*key, "openmpi"), results.bare_loops(*key)
                if not (openmpi.ratio or mpich.ratio or gloo.ratio or bare):
                    continue
                verdicts += [openmpi, mpich, gloo]
                rows.append([op, str(ranks), size_name(size), memory if size else "", tag, openmpi.cell(), openmpi.target(),
                             "%.2f, %s" % (bare, SETTINGS[loops[0].setting]) if bare else "",
                             percent(results.bare_share(*key)), mpich.cell(),
                             gloo.cell() + (" (%s)" % gloo.target() if gloo.target() else "")])
    return table("All operations: times faster than each peer. Parentheses: the target against Gloo",
                 ["operation", "ranks", "bytes", "memory", "cores", "Open MPI", "target", "bare loops against Open MPI",
                  "share of bare loops", "MPICH", "Gloo"], rows)


def times(results):
    """Median microseconds over blocks."""
    rows = []
    keys = sorted({key[1:] for key in results.by_key if key[0] == "ddp"},
                  key=lambda k: (k[1], k[0] != "all_reduce", k[0], k[2], k[3] == "far"))
    for op, ranks, size, tag in keys:
        cells = [op, str(ranks), size_name(size), tag]
        for memory in ["group", "private"]:
            found = results.ddp(op, memory, ranks, size, tag)
            cells.append(number(median_us(found)) if found else "")
        for peer in ["openmpi", "mpich", "gloo"]:
            found = results.peer(peer, op, ranks, size, tag)
            text = number(median_us(found)) if found else ""
            if found and found[0].setting != "stock":
                text += ", " + SETTINGS.get(found[0].setting, found[0].setting)
            cells.append(text)
        rows.append(cells)
    return table("Median time in microseconds. Peers: the fastest setting, named if it is not the default",
                 ["operation", "ranks", "bytes", "cores", "group", "private", "Open MPI", "MPICH", "Gloo"], rows)


def bound(results, misses):
    """All-reduce of large buffers as a share of what memory allows."""
    rows = []
    for size in [64 * MIB, 256 * MIB]:
        for tag in PLACES:
            loops = results.bare_loops("all_reduce", "group", 2, size, tag)
            if not loops:
                continue
            us = median_us(loops)
            cells = [size_name(size), tag, number(us), "%.0f" % (4 * size / us / 1e3)]
            for memory in ["group", "private"]:
                share = median_ratio(results.ddp("all_reduce", memory, 2, size, tag), loops)
                if share is None:
                    cells.append("-")
                    continue
                target = BOUND_SHARE[memory, tag]
                mark = "**" if share < target else ""
                cells.append("%s%s%s (%s)" % (mark, percent(share), mark, percent(target)))
                if share < target:
                    misses.append("all_reduce, %s, %s memory, %s: %s of the memory bound, target %s" % (
                        size_name(size), memory, tag, percent(share), percent(target)))
            rows.append(cells)
    return table("Share of the memory bound: time of the bare loops in group memory / time of the all-reduce (target)",
                 ["bytes", "cores", "bound, us", "bound, GB/s", "group", "private"], rows)


def copies(results):
    lines = []
    for tag in PLACES:
        found = results.get("memory", "copy", 2, 256 * MIB, tag)
        if found:
            lines.append("memcpy of 256 MiB on both cores at once, %s: %.0f GB/s written." % (
                tag, 2 * 256 * MIB / median_us(found) / 1e3))
    return lines + [""] if lines else []


def barrier(results, misses):
    lines = []
    for tag in PLACES:
        found = results.ddp("barrier", "group", 2, 0, tag)
        if found:
            us = median_us(found)
            lines.append("Barrier of 2 ranks, %s: %.3f us (target: below %.2f us)." % (tag, us, BARRIER_US[tag]))
            if us > BARRIER_US[tag]:
                misses.append("barrier, %s: %.3f us, target below %.2f us" % (tag, us, BARRIER_US[tag]))
    return lines + [""] if lines else []


def missed(results, verdicts, misses):
    """How many targets were missed, and which."""
    rows = []
    judged = {(v.key, v.peer): v for v in verdicts if v.ratio and v.required}.values()
    count = "Targets against peers: %d. Restated: %d. Missed: %d." % (
        len(judged), sum(v.restated for v in judged), sum(v.missed for v in judged))
    for v in judged:
        if not v.missed:
            continue
        op, memory, ranks, size, tag = v.key
        setting = results.peer(v.peer, op, ranks, size, tag)[0].setting
        default = results.ratio(*v.key, v.peer, "stock")
        rows.append([op, str(ranks), size_name(size), memory, tag, "%.2f" % v.ratio, v.target(), percent(v.share),
                     SETTINGS.get(setting, setting), "%.2f" % default if default else ""])
    lines = [count, ""] + table("Missed targets. The last column compares with Open MPI in its default setting.",
                  ["operation", "ranks", "bytes", "memory", "cores", "times faster than Open MPI", "target",
                   "share of bare loops", "Open MPI's fastest setting", "times faster than its default"], rows)
    return lines + ["- " + miss for miss in misses] if misses else lines[:-1]


def plot_data(results, folder):
    """One data block per curve and placement, named for gnuplot's index."""
    with open(os.path.join(folder, "all_reduce.dat"), "w") as file:
        for tag in PLACES:
            curves = [("group", lambda s: results.ddp("all_reduce", "group", 2, s, tag)),
                      ("private", lambda s: results.ddp("all_reduce", "private", 2, s, tag)),
                      ("openmpi", lambda s: results.peer("openmpi", "all_reduce", 2, s, tag)),
                      ("mpich", lambda s: results.peer("mpich", "all_reduce", 2, s, tag)),
                      ("gloo", lambda s: results.peer("gloo", "all_reduce", 2, s, tag)),
                      ("bound", lambda s: results.bare_loops("all_reduce", "group", 2, s, tag))]
            for name, blocks in curves:
                file.write("# %s %s\n" % (name, tag))
                points = 0
                for size in SIZES:
                    if blocks(size):
                        file.write("%d %.4f\n" % (size, median_us(blocks(size))))
                        points += 1
                file.write("" if points else "NaN NaN\n")
                file.write("\n\n")


def main():
    folder = sys.argv[1]
    blocks, mixed = read(os.path.join(folder, "collectives.csv"))
    counts = collections.Counter(b.tag for b in blocks)
    PLACES[:] = [tag for tag in PLACES if counts[tag] * 20 > len(blocks)]  # a placement that hardly occurred is left out
    blocks = [b for b in blocks if b.tag in PLACES]
    results, verdicts, misses = Results(blocks), [], []
    preempted = sum(1 for b in blocks if b.preempted > 10 and b.ranks == 2)
    lines = all_reduce_ratios(results, verdicts)
    if lines:
        lines += ["Bold: target missed. (r): restated target, %s of the bare loops." % percent(BARE_SHARE), ""]
    lines += all_ratios(results, verdicts) + barrier(results, misses) + bound(results, misses) + copies(results)
    lines += times(results)
    lines += ["Blocks: %d near, %d far, %d mixed (dropped). %d blocks of 2 ranks had more than 10 preemptions." % (
        counts["near"], counts["far"], mixed, preempted), ""]
    lines += missed(results, verdicts, misses)
    with open(os.path.join(folder, "collectives.md"), "w") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))
    plot_data(results, folder)
    if len(sys.argv) > 2:
        name = os.path.basename(os.path.normpath(folder))
        begin, end = "<!-- measured %s -->\n" % name, "<!-- end %s -->" % name
        with open(sys.argv[2]) as file:
            page = file.read()
        if begin not in page or end not in page:
            sys.exit("%s: missing the lines %s and %s" % (sys.argv[2], begin.strip(), end))
        head, rest = page.split(begin, 1)
        with open(sys.argv[2], "w") as file:
            file.write(head + begin + "\n".join(lines) + "\n" + end + rest.split(end, 1)[1])


main()

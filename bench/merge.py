"""Reads collectives.csv in the folder given, prints the tables, writes collectives.md and the data of plot.gp. A second argument names a
page: its part between the lines <!-- measured NAME --> and <!-- end NAME --> is replaced by the tables, NAME being the folder's own.

A block of ours is divided into the nearest block of the peer in time (at most 60 s away) with the same operation, size, ranks and placement; the
figure is the median of these ratios. Of a peer's settings the one with the lowest median counts, size by size and placement by placement.
Blocks whose two ping-pongs disagree (one near, one far) are dropped.
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
# operation, memory, ranks, bytes, peer -> times faster that is required
REQUIRED = {}
for memory, row in {"group": [2, 5, 8, 6, 4.5, 2.4, 2.1], "private": [2, 4.5, 3, 2, 2.2, 1.6, 1.5]}.items():
    for size, ratio in zip(SIZES, row):
        REQUIRED["all_reduce", memory, 2, size, "openmpi"] = ratio
for memory, gloo, scatter, gather, four in [("group", 10, 12, 1.6, 5), ("private", 5, 6, 1.3, 2)]:
    REQUIRED["all_reduce", memory, 2, LARGE, "gloo"] = gloo
    REQUIRED["reduce_scatter", memory, 2, LARGE, "openmpi"] = REQUIRED["reduce_scatter_in_place", memory, 2, LARGE, "openmpi"] = scatter
    REQUIRED["all_gather", memory, 2, LARGE, "openmpi"] = gather
    REQUIRED["all_reduce", memory, 4, LARGE, "openmpi"] = four
BARRIER_US = {"near": 0.25, "far": 0.6}
BOUND_SHARE = {("group", "near"): 0.8, ("group", "far"): 0.8, ("private", "near"): 0.4, ("private", "far"): 0.3}
NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "gloo": "Gloo"}
SETTINGS = {"stock": "its own choice", "ring": "ring in 1 MiB segments", "eager": "recursive doubling, eager limit 64 KiB", "sm": "coll/sm",
            "halving": "halving and doubling", "yield": "yielding", "spin": "spinning", "slots-8": "8 KiB slots", "slots-128": "128 KiB slots",
            "slots-256": "256 KiB slots", "slots-512": "512 KiB slots", "line-64": "64 KiB slots, line by line", "line-128": "128 KiB slots, line by line",
            "read": "process_vm_readv", "-": "in place"}

Block = collections.namedtuple("Block", "system setting op memory ranks bytes time tag us preempted")


def read(path):
    blocks, mixed = [], 0
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            if row["tag"] == "mixed":
                mixed += 1
                continue
            blocks.append(Block(row["system"], row["setting"], row["op"], row["memory"], int(row["ranks"]), int(row["bytes"]),
                                float(row["time_s"]), row["tag"], float(row["median_us"]), int(row["preempted"])))
    return blocks, mixed


class Results:
    def __init__(self, blocks):
        self.by_key = {}
        for b in blocks:
            self.by_key.setdefault((b.system, b.op, b.ranks, b.bytes, b.tag), []).append(b)

    def get(self, *key):
        return self.by_key.get(key, [])

    def ours(self, op, memory, ranks, size, tag):
        return [b for b in self.get("ddp", op, ranks, size, tag) if b.memory == memory]

    def best(self, system, op, ranks, size, tag, setting=None):
        """Blocks of the peer's fastest setting, or of the one named."""
        by_setting = {}
        for b in self.get(system, op, ranks, size, tag):
            if setting in (None, b.setting):
                by_setting.setdefault(b.setting, []).append(b)
        return min(by_setting.values(), key=median_us, default=[])

    def ratio(self, op, memory, ranks, size, tag, peer, setting=None):
        """(median ratio, pairs), or None when one side has no block."""
        theirs = self.best(peer, op, ranks, size, tag, setting)
        ratios = []
        for block in self.ours(op, memory, ranks, size, tag):
            near = min(theirs, key=lambda other: abs(other.time - block.time), default=None)
            if near and abs(near.time - block.time) <= 60:
                ratios.append(near.us / block.us)
        return (statistics.median(ratios), len(ratios)) if ratios else None

    def bare_blocks(self, op, memory, ranks, size, tag):
        """Of the bare loops on this memory, those that are fastest."""
        by_setting = {}
        for b in self.get("memory", op, ranks, size, tag):
            if b.memory == memory:
                by_setting.setdefault(b.setting, []).append(b)
        return min(by_setting.values(), key=median_us, default=[])

    def bare(self, op, memory, ranks, size, tag, peer):
        """(how many times faster than the peer the bare loops are, which): no library can be further ahead. None where they were not measured."""
        theirs, bare = self.best(peer, op, ranks, size, tag), self.bare_blocks(op, memory, ranks, size, tag)
        return (median_us(theirs) / median_us(bare), SETTINGS[bare[0].setting]) if theirs and bare else None


def median_us(blocks):
    return statistics.median(b.us for b in blocks)


def size_name(size):
    return "%d MiB" % (size // MIB) if size >= MIB else "%d KiB" % (size // KIB) if size else ""


def number(value):
    return "%.0f" % value if value >= 1000 else "%.3g" % value


def table(title, head, rows):
    if not rows:
        return []
    lines = [title, "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows] + [""]


def all_reduce_ratios(results, misses):
    """Measured / required; a row per memory and placement."""
    rows = []
    for memory in ["group", "private"]:
        required = ["%g" % REQUIRED["all_reduce", memory, 2, size, "openmpi"] for size in SIZES]
        measured = []
        for tag in PLACES:
            cells = []
            for size in SIZES:
                cells.append(judged(results, misses, "all_reduce", memory, 2, size, tag, "openmpi"))
            if any(cell != "-" for cell in cells):
                measured.append([memory, tag] + cells)
                bare = [results.bare("all_reduce", memory, 2, size, tag, "openmpi") for size in SIZES]
                measured.append([memory, tag + ", bare loops"] + ["%.3g" % found[0] if found else "" for found in bare])
        rows += [[memory, "required"] + required] + measured if measured else []
    return table("All_reduce of f32, two ranks: times faster than Open MPI in its best setting",
                 ["memory", "cores"] + [size_name(size) for size in SIZES], rows)


def judged(results, misses, op, memory, ranks, size, tag, peer):
    found = results.ratio(op, memory, ranks, size, tag, peer)
    if not found:
        return "-"
    required = REQUIRED.get((op, memory, ranks, size, peer))
    if required and found[0] < required:
        miss = "%s, %s, %d ranks, %s memory, %s: %.2f times %s, required %g" % (op, size_name(size), ranks, memory, tag, found[0], NAMES[peer],
                                                                            required)
        best, stock = results.best(peer, op, ranks, size, tag)[0].setting, results.ratio(op, memory, ranks, size, tag, peer, "stock")
        if stock and best != "stock":
            miss += " (its setting: %s; %.2f times its own choice)" % (SETTINGS.get(best, best), stock[0])
        bare = results.bare(op, memory, ranks, size, tag, peer)
        if bare:
            miss += "; the bare loops: %.2f times%s" % (bare[0], ", so it cannot be had here" if found[0] / 1.05 < bare[0] < required else "")
        misses.append(miss)
        return "**%.2f**" % found[0]
    return "%.2f" % found[0] if found[0] < 10 else "%.1f" % found[0]


def other_ratios(results, misses):
    rows = []
    keys = [("all_reduce", 2, LARGE), ("reduce_scatter", 2, LARGE), ("reduce_scatter_in_place", 2, LARGE), ("all_gather", 2, LARGE),
            ("broadcast", 2, LARGE), ("send_recv", 2, KIB),
            ("send_recv", 2, LARGE), ("barrier", 2, 0), ("all_reduce", 4, KIB), ("all_reduce", 4, 256 * KIB), ("all_reduce", 4, LARGE),
            ("barrier", 4, 0)]
    for op, ranks, size in keys:
        for memory in ["group", "private"]:
            for tag in PLACES:
                cells = []
                for peer in ["openmpi", "mpich", "gloo"]:
                    cell = judged(results, misses, op, memory, ranks, size, tag, peer)
                    required = REQUIRED.get((op, memory, ranks, size, peer))
                    cells.append(cell + (" (%g)" % required if required and cell != "-" else ""))
                bare = results.bare(op, memory, ranks, size, tag, "openmpi")
                cells.insert(1, "%.2f, %s" % bare if bare else "")
                if any(cell not in ("-", "") for cell in cells):
                    rows.append([op, str(ranks), size_name(size), memory if size else "", tag] + cells)
    return table("All operations: times faster than each peer (required in brackets), and how many times faster than Open MPI the bare loops are",
                 ["operation", "ranks", "bytes", "memory", "cores", "Open MPI", "bare loops", "MPICH", "Gloo"], rows)


def times(results):
    """Median microseconds over blocks."""
    rows = []
    keys = sorted({key[1:] for key in results.by_key if key[0] == "ddp"}, key=lambda k: (k[1], k[0] != "all_reduce", k[0], k[2], k[3] == "far"))
    for op, ranks, size, tag in keys:
        cells = [op, str(ranks), size_name(size), tag]
        for memory in ["group", "private"]:
            found = results.ours(op, memory, ranks, size, tag)
            cells.append(number(median_us(found)) if found else "")
        for peer in ["openmpi", "mpich", "gloo"]:
            found = results.best(peer, op, ranks, size, tag)
            text = number(median_us(found)) if found else ""
            cells.append(text + (", " + SETTINGS.get(found[0].setting, found[0].setting) if found and found[0].setting != "stock" else ""))
        rows.append(cells)
    return table("Median time in microseconds, each peer's best setting (named where it is not the library's own choice)",
                 ["operation", "ranks", "bytes", "cores", "group", "private", "Open MPI", "MPICH", "Gloo"], rows)


def bound(results, misses):
    rows = []
    for size in [64 * MIB, 256 * MIB]:
        for tag in PLACES:
            pair = results.bare_blocks("all_reduce", "group", 2, size, tag)
            if not pair:
                continue
            cells = [size_name(size), tag, number(median_us(pair)), "%.0f" % (4 * size / median_us(pair) / 1e3)]
            for memory in ["group", "private"]:
                ratios = []
                for block in results.ours("all_reduce", memory, 2, size, tag):
                    near = min(pair, key=lambda other: abs(other.time - block.time))
                    if abs(near.time - block.time) <= 60:
                        ratios.append(near.us / block.us)
                if not ratios:
                    cells.append("-")
                    continue
                share, required = statistics.median(ratios), BOUND_SHARE[memory, tag]
                cells.append("%.0f%% (%.0f%%)" % (100 * share, 100 * required))
                if share < required:
                    cells[-1] = "**%.0f%%** (%.0f%%)" % (100 * share, 100 * required)
                    misses.append("all_reduce, %s, %s memory, %s: %.0f%% of the memory bound, required %.0f%%" % (
                        size_name(size), memory, tag, 100 * share, 100 * required))
            rows.append(cells)
    return table("Share of the memory bound: time of the bare loops divided by time of the all_reduce",
                 ["bytes", "cores", "bound, us", "bound, GB/s", "group (required)", "private (required)"], rows)


def copies(results):
    lines = []
    for tag in PLACES:
        found = results.get("memory", "copy", 2, 256 * MIB, tag)
        if found:
            lines.append("memcpy of 256 MiB on both cores at once, %s: %.0f GB/s written." % (tag, 2 * 256 * MIB / median_us(found) / 1e3))
    return lines + [""] if lines else []


def barrier(results, misses):
    lines = []
    for tag in PLACES:
        found = results.ours("barrier", "group", 2, 0, tag)
        if found:
            us = median_us(found)
            lines.append("Barrier of two ranks, %s: %.3f us (required: under %.2f)." % (tag, us, BARRIER_US[tag]))
            if us > BARRIER_US[tag]:
                misses.append("barrier, %s: %.3f us, required under %.2f us" % (tag, us, BARRIER_US[tag]))
    return lines + [""] if lines else []


def plot_data(results, folder):
    """One data block per curve and placement, named for gnuplot's index."""
    with open(os.path.join(folder, "all_reduce.dat"), "w") as file:
        for tag in PLACES:
            curves = [("group", lambda s: results.ours("all_reduce", "group", 2, s, tag)),
                      ("private", lambda s: results.ours("all_reduce", "private", 2, s, tag)),
                      ("openmpi", lambda s: results.best("openmpi", "all_reduce", 2, s, tag)),
                      ("mpich", lambda s: results.best("mpich", "all_reduce", 2, s, tag)),
                      ("gloo", lambda s: results.best("gloo", "all_reduce", 2, s, tag)),
                      ("bound", lambda s: results.bare_blocks("all_reduce", "group", 2, s, tag))]
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
    PLACES[:] = [tag for tag in PLACES if counts[tag] * 20 > len(blocks)]  # where the cores hardly ever were is no result
    blocks = [b for b in blocks if b.tag in PLACES]
    results, misses = Results(blocks), []
    preempted = sum(1 for b in blocks if b.preempted > 10 and b.ranks == 2)
    lines = all_reduce_ratios(results, misses) + other_ratios(results, misses) + barrier(results, misses) + bound(results, misses) + copies(results) + times(results)
    lines += ["Blocks: %d near, %d far, %d dropped as mixed; %d of those kept were interrupted more than ten times." % (
        counts["near"], counts["far"], mixed, preempted), ""]
    unique = list(dict.fromkeys(misses))
    lines += ["Short of what is required:", ""] + ["- " + miss for miss in unique] if unique else ["Everything required that was measured is reached."]
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
            sys.exit("%s has no part between %s and %s" % (sys.argv[2], begin.strip(), end))
        head, rest = page.split(begin, 1)
        with open(sys.argv[2], "w") as file:
            file.write(head + begin + "\n".join(lines) + "\n" + end + rest.split(end, 1)[1])


main()

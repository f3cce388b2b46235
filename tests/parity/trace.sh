#!/bin/sh
# examples/trace.c on 1, 2 and 4 ranks: the file is JSON, with events of
# every rank.
# usage: trace.sh path/of/trace
. "$(dirname "$0")/../support/train_gpt.sh"
counts="1 2 4"
[ "$slowdown" -eq 1 ] || counts=2 # 2 is enough under sanitizers
for ranks in $counts; do
    timeout "$limit" "$program" $ranks "$ranks.json" > out 2>&1 || fail "$ranks ranks: status $?: $(cat out)"
    python3 - "$ranks.json" $ranks <<'END' > err 2>&1 || fail "$ranks ranks: $(cat err)"
import json, sys
events = json.load(open(sys.argv[1]))
ranks = int(sys.argv[2])
assert {e["pid"] for e in events} == set(range(ranks)), "a rank has no events"
steps = [e for e in events if e["name"] == "backward"]
assert len(steps) == 4 * ranks, "backward: %d events" % len(steps)
assert all(0 < e["dur"] < 60e6 for e in steps), "durations are not microseconds"
inside = [e for e in events if e.get("args", {}).get("in") == "ddp_reducer_ready"]
assert all(e["name"] == "ddp_all_reduce" for e in inside), "a bucket is not an all_reduce"
# Row 1 is the communication thread. A bucket that it has not begun is reduced by ddp_reducer_wait itself, in row 0.
assert {e["tid"] for e in inside} <= {0, 1}, "a bucket is in the row of messages"
assert ranks == 1 or any(e["tid"] == 1 for e in inside), "no bucket was reduced by the communication thread"
END
done
echo "trace: JSON with the events of every rank on $counts ranks"

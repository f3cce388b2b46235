#!/bin/sh
# examples/port.md makes examples/serial.c parallel. Applies its three diffs with patch, compiles each result
# with the line of port.md, and runs it on 1, 2 and 4 ranks: the losses are those of serial.c, and steps 2 and
# 3 print the same digits on any number of ranks. 3 ranks are one sentence.
# usage: port.sh path/of/serial ROOT OBJECT [FLAGS]   OBJECT has the bodies of ddp.h and ddp_fsdp.h: compiling
#                                                     them three times would take a minute; FLAGS: sanitizers
. "$(dirname "$0")/../support/train_gpt.sh"
root=$2 object=$3 flags=${4:-}
cp "$root/ddp.h" "$root/ddp_fsdp.h" "$root/examples/serial.c" .
timeout "$limit" "$program" > serial.out || fail "serial: status $?"
awk '/^```diff$/ { n++; inside = 1; next } /^```/ { inside = 0 } inside { print > ("step" n ".diff") }' "$root/examples/port.md"
[ -f step3.diff ] && [ ! -f step4.diff ] || fail "port.md has not three diffs"
line=$(sed -n 's/^cc \(.* step1\.c .*\)$/\1/p' "$root/examples/port.md")
[ -n "$line" ] || fail "port.md has no line that compiles step1.c"
# The bodies of the headers are in the object.
included="-DDDP_IMPLEMENTATION_INCLUDED -DDDP_FSDP_IMPLEMENTATION_INCLUDED"

# losses NAME: the losses that NAME.out shows.
losses() { sed -n 's/.*loss \([0-9.]*\).*/\1/p' "$1.out"; }
counts="1 2 4"
[ "$slowdown" -eq 1 ] || counts=2 # 2 is enough under sanitizers
before=serial
for step in 1 2 3; do
    patch -s -o "step$step.c" "$before.c" "step$step.diff" > log 2>&1 || fail "step$step.diff: $(cat log)"
    before=step$step
    # shellcheck disable=SC2086 # words
    ${CC:-cc} $included $flags -Wall -Wextra -Werror $(echo "$line" | sed "s/step1/step$step/g") "$object" > log 2>&1 ||
        fail "step$step.c: $(cat log)"
    for ranks in $counts; do
        timeout "$limit" "./step$step" $ranks > "$ranks.out" 2> err || fail "step $step, $ranks ranks: status $?: $(cat err)"
        losses serial > a
        losses $ranks > b
        paste a b | awk '{ d = $1 - $2; if (d < 0) d = -d; if (NF != 2 || d > 1e-5 * $1 + 1e-6) bad = 1 } END { exit bad || NR != 4 }' ||
            fail "step $step, $ranks ranks: other losses than those of serial.c: $(cat a b)"
        [ "$ranks" != "${counts%% *}" ] || cp b first
        [ $step -eq 1 ] || cmp -s first b || fail "step $step: $ranks ranks have other bits than ${counts%% *}"
    done
    output=$("./step$step" 3 2>&1) && fail "step $step: 3 ranks are not refused"
    [ "$output" = "./step$step: 3 ranks: use 1, 2 or 4" ] || fail "step $step, 3 ranks: $output"
done
echo "port.md: three steps, each with the losses of serial.c on 1, 2 and 4 ranks"

#!/bin/sh
# examples/tp_layers.c prints the same losses on 1, 2 and 4 ranks, except for rounding; a rank of 2 computes
# about half as much as a rank of 1.
# usage: tp_layers.sh path/of/program
. "$(dirname "$0")/../support/train_gpt.sh"
counts="1 2 4"
[ "$slowdown" -eq 1 ] || counts="1 2" # fewer under sanitizers
for ranks in $counts; do
    timeout "$limit" "$program" $ranks > out 2> err || fail "$ranks ranks: status $?: $(cat err)"
    sed -n 's/.*loss //p' out > losses$ranks
    paste losses1 losses$ranks | awk '{ d = $1 - $2; if (d < 0) d = -d; if (NF != 2 || d > 1e-4) bad = 1 }
        END { exit bad || NR != 5 }' || fail "$ranks ranks have other losses: $(cat losses1 losses$ranks)"
    sed -n 's/^a rank.s step: \([0-9.]*\) million.*/\1/p' out > work$ranks
done
[ "$(cat work1 work2 | tr '\n' ' ' | awk '{ print ($1 > 1.9 * $2 && $1 < 2.1 * $2) }')" = 1 ] ||
    fail "the work is not split: $(cat work1 work2)"
echo "tp_layers: the losses of 1 rank on $counts ranks"

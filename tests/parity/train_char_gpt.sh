#!/bin/sh
# The example train_char_gpt.c: 1, 2 and 4 ranks, and those of mpirun, end with one hash of the weights. Wrong
# arguments and files are one sentence.
# usage: train_char_gpt.sh path/of/program TEXT
. "$(dirname "$0")/../support/train_gpt.sh"
text=$2
steps=2
counts="1 2 4"
[ "$slowdown" -eq 1 ] || { counts=2; steps=1; } # enough under sanitizers
for ranks in $counts; do
    timeout "$limit" "$program" "$ranks" "$text" $steps > "ranks$ranks" 2> err || fail "$ranks ranks: status $?: $(cat err)"
    tail -n 1 ranks$ranks > hash$ranks
    grep -Eq '^weights [0-9a-f]{16}$' hash$ranks || fail "$ranks ranks: no hash: $(cat hash$ranks)"
    cmp -s hash2 hash$ranks || [ "$ranks" = 1 ] || fail "$ranks ranks have other bits: $(cat hash2 hash$ranks)"
done
[ "$counts" = 2 ] || cmp -s hash1 hash2 || fail "2 ranks have other bits: $(cat hash1 hash2)"
if [ "$slowdown" -eq 1 ] && command -v mpirun > /dev/null; then
    flags=
    mpirun --version | grep -q 'Open MPI' && flags="--allow-run-as-root --oversubscribe"
    timeout "$limit" mpirun $flags -n 2 "$program" 2 "$text" $steps > mpirun 2>&1 || fail "mpirun: $(cat mpirun)"
    tr -d '\r' < mpirun | grep '^weights' > hash
    cmp -s hash hash2 || fail "mpirun has other bits: $(cat hash hash2)"
fi

head -c 1000 "$text" > short
before=$(state)
wrong "usage: " x
wrong "usage: " 2 "$text" 0
wrong "3 ranks: use 1, 2 or 4" 3 "$text"
wrong "cannot read README.md: give a text file" # there is none in this folder
wrong "cannot read missing: give a text file" 2 missing
wrong ". has fewer than 1300 bytes" 2 .
wrong "short has fewer than 1300 bytes" 2 short
echo "train_char_gpt: the same weights on 1, 2 and 4 ranks, and one sentence for each wrong input"

#!/bin/sh
# An example that takes the number of ranks: 1 and 4 ranks, and 2 of mpirun, print the same lines, which contain
# a match of the pattern and a hash. Wrong arguments are one sentence. Under sanitizers only 2 ranks run.
# With "fashion" the same on Fashion-MNIST, and wrong files; skipped where it is not installed.
# usage: same_hash.sh path/of/program PATTERN [fashion]
. "$(dirname "$0")/../support/train_gpt.sh"
data=
[ "${3:-}" != fashion ] || { fashion; data=data; }
counts="1 4"
[ "$slowdown" -eq 1 ] || counts=2
for ranks in $counts; do
    timeout "$limit" "$program" "$ranks" $data > "ranks$ranks" 2> err || fail "$ranks ranks: status $?: $(cat ranks$ranks err)"
    grep -Eq "$2" "ranks$ranks" || fail "no '$2' in: $(cat ranks$ranks)"
    tail -n 1 "ranks$ranks" | grep -Eq '^weights [0-9a-f]{16}$' || fail "no hash in: $(cat ranks$ranks)"
    cmp -s "ranks${counts%% *}" "ranks$ranks" || fail "$ranks ranks print: $(cat ranks$ranks), not $(cat "ranks${counts%% *}")"
done
[ "$slowdown" -eq 1 ] || exit 0
if command -v mpirun > /dev/null; then
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout "$limit" mpirun --oversubscribe -n 2 "$program" 2 $data > mpi 2> err ||
        fail "mpirun: status $?: $(cat mpi err)"
    cmp -s mpi ranks4 || fail "mpirun prints: $(cat mpi)"
fi
if [ -n "$data" ]; then
    mkdir short
    before=$(state)
    wrong "is missing, or not a file of MNIST" 2 short
    cp data/train-* short
    truncate -s 60007 short/train-labels-idx1-ubyte
    before=$(state)
    wrong "train-labels-idx1-ubyte is missing, or not a file of MNIST" 2 short
    head -c 60008 /dev/zero | tr '\0' '\12' > short/train-labels-idx1-ubyte # all are 10
    before=$(state)
    wrong "a label is not below 10" 2 short
    echo "the same result on Fashion-MNIST on 1, 2 and 4 ranks, and one sentence for each wrong file"
    exit 0
fi
before=$(state)
for arguments in x 0 "2 folder more"; do
    # shellcheck disable=SC2086 # the words are arguments
    wrong "usage: " $arguments
done
wrong "3 ranks: use 1, 2 or 4" 3
echo "the same result on 1, 2 and 4 ranks, and with mpirun"

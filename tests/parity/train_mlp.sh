#!/bin/sh
# The examples train_mlp*.c on their synthetic data: 1, 2 and 4 ranks end with one hash of the weights, which
# is also the same for data parallelism, sharded parameters and the pipeline. train_mlp also stops early and
# keeps its best weights. Bad arguments are one sentence.
# With "fashion": at least 87% on Fashion-MNIST; skipped where it is not installed.
# usage: train_mlp.sh path/of/program NAME [HASH_OF_PROGRAM | fashion]
. "$(dirname "$0")/../support/train_gpt.sh"
name=$2
if [ "${3:-}" = fashion ]; then
    fashion
    timeout $((limit * 4)) "$program" 2 data > out 2> err || fail "status $?: $(cat err)"
    right=$(sed -n 's/.*epoch 4\/4 .*accuracy \([0-9]*\)\..*/\1/p' out)
    [ "${right:-0}" -ge 87 ] || fail "too few right: $(cat out)"
    echo "$name: $right% of the test images"
    exit 0
fi

run() { timeout "$limit" "$program" "$1" > "ranks$1" 2> err || fail "$1 ranks: status $?: $(cat err)"; }
counts="1 2 4"
[ "$slowdown" -eq 1 ] || counts=2 # 2 is enough under sanitizers
for ranks in $counts; do
    run $ranks
    grep -q 'epoch 4/4   loss [0-9.]*   test accuracy \(9[5-9]\|100\)\.' ranks$ranks || fail "$ranks ranks have not learnt: $(cat ranks$ranks)"
    ! grep -q "$(printf '\r')" ranks$ranks || fail "a file gets the progress that is for a terminal"
    if [ "$name" != train_mlp_tensor ]; then # its sums are rounded in another order
        tail -n 1 ranks$ranks > hash$ranks
        grep -Eq '^weights [0-9a-f]{16}$' hash$ranks || fail "$ranks ranks: no hash: $(cat hash$ranks)"
        cmp -s hash${counts%% *} hash$ranks || fail "$ranks ranks have other bits: $(cat hash${counts%% *} hash$ranks)"
    fi
done
if [ $# -gt 2 ] && [ "$slowdown" -eq 1 ]; then # the program of train_mlp.c, built with the same flags
    timeout "$limit" "$3" 1 | tail -n 1 > plain
    cmp -s plain hash1 || fail "train_mlp has other bits: $(cat plain hash1)"
fi

if [ "$name" = train_mlp ]; then # early stopping ends with the best weights, the same on 1 and 2 ranks
    for ranks in 1 2; do
        timeout "$limit" "$program" $ranks - best$ranks.npy > stopped$ranks 2> err || fail "best.npy: status $?: $(cat err)"
        grep -q '^best weights in ' stopped$ranks || fail "no best weights: $(cat stopped$ranks)"
        ! grep -q '^epoch 20/20' stopped$ranks || fail "no early stopping: $(cat stopped$ranks)"
    done
    cmp -s best1.npy best2.npy || fail "2 ranks have saved other weights than 1"
    before=$(state)
    wrong "npy_save: creating missing/best.npy" 2 - missing/best.npy
    wrong "usage: " 2 - best.npy more
fi

before=$(state)
wrong "usage: " x
wrong "3 ranks: use " 3
mkdir short
before=$(state)
wrong "is missing, or not a file of MNIST" 2 short
head -c 1000 /dev/zero > short/train-images-idx3-ubyte
before=$(state)
wrong "is missing, or not a file of MNIST" 2 short
for file in train-images-idx3-ubyte:47040016 train-labels-idx1-ubyte:60008 t10k-images-idx3-ubyte:7840016 t10k-labels-idx1-ubyte:10008; do
    truncate -s "${file#*:}" "short/${file%:*}"
done
tr '\0' '\12' < short/train-labels-idx1-ubyte > labels && mv labels short/train-labels-idx1-ubyte # all are 10
before=$(state)
wrong "a label is not below 10" 2 short
echo "$name: the same weights on 1, 2 and 4 ranks, and one sentence for each wrong input"

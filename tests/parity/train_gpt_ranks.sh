#!/bin/sh
# The same global batch and micro-batch print the same losses and end with the same weights, bit for bit, on
# 1, 2, 3 and 4 ranks, as processes and as threads, with and without dropout.
# usage: train_gpt_ranks.sh path/of/train_gpt
. "$(dirname "$0")/../support/train_gpt.sh"

seq 1 3000 > text
steps=8 worlds='1 2 4' kinds='processes threads'
if [ "$slowdown" -gt 1 ]; then steps=3 worlds=4; fi
if [ "$slowdown" -gt 3 ]; then kinds=threads; fi # it is they that ThreadSanitizer sees
tiny="--layers 2 --heads 2 --channels 32 --context 32 --micro-batch 2 --steps $steps text"

# train NAME FLAGS...: NAME.out is the output.
train() {
    name=$1
    shift
    # shellcheck disable=SC2086
    timeout "$limit" "$program" $tiny "$@" > "$name.out" 2> "$name.err" || fail "$name: status $?: $(cat "$name.err")"
    comparable "$name"
    ended "$name"
    [ "$(grep -c 'gradient norm' "$name.same")" -eq $steps ] || fail "$name: not every step printed its loss"
    [ -s loss.svg ] || fail "$name: no loss.svg"
}

train one --batch 16 --ranks 1
for ranks in $worlds; do
    for kind in $kinds; do
        flag=
        if [ $kind = threads ]; then flag=--threads-as-ranks; fi
        train "$kind$ranks" --batch 16 --ranks $ranks $flag
        same one "$kind$ranks"
    done
done

train odd1 --batch 24 --ranks 1
train odd3 --batch 24 --ranks 3
same odd1 odd3
# Forward runs again in backward, and leaves no trace but in memory and time.
train recompute --batch 16 --ranks 2 --recompute
same one recompute
grep -q '^  yes (this run) .* MiB .* ms$' recompute.out || fail "no table of what --recompute saves: $(grep MiB recompute.out)"
grep -q '^  no (this run) .* MiB .* ms$' one.out || fail "no table of what --recompute would save: $(grep MiB one.out)"
# Dropout depends on the sequence, not on ranks, threads and recomputation. Probability 0 is none.
train dropout --batch 16 --ranks 1 --dropout 0.2
for ranks in $worlds; do
    flag=
    if [ "$ranks" -eq 4 ] || [ "$kinds" = threads ]; then flag=--threads-as-ranks; fi
    train "dropout$ranks" --batch 16 --ranks $ranks --dropout 0.2 --recompute $flag
    same dropout "dropout$ranks"
done
train dropout_odd1 --batch 24 --ranks 1 --dropout 0.2
train dropout_odd3 --batch 24 --ranks 3 --dropout 0.2
same dropout_odd1 dropout_odd3
train dropout0 --batch 16 --ranks 2 --dropout 0
same one dropout0
cmp -s one.same dropout.same && fail "dropout changed nothing"
train seed --batch 16 --ranks 2 --seed 2
cmp -s one.same seed.same && fail "another seed gave the same run"
echo "train_gpt: the same bits on 1, $worlds and 3 ranks: $(tail -n 1 one.out)"

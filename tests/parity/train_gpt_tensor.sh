#!/bin/sh
# The trainer on tensor-parallel ranks prints the losses of train_gpt, within 1e-4: tensor groups of 1, 2 and
# 4 ranks and two groups of two, with and without sequence parallelism, in chunks, as processes and as
# threads, which end with the same bits; resumed with another group, and by train_gpt. A layer sends the
# expected number of elements. Invalid input is one sentence.
# usage: train_gpt_tensor.sh path/of/train_gpt_tensor, with train_gpt of the same flavour in the same folder
. "$(dirname "$0")/../support/train_gpt.sh"
whole=$(dirname "$program")/$(basename "$program" | sed 's/_tensor//')

seq 1 300 > text # short: the run goes through several epochs
run="--heads 4 --channels 16 --context 16 --micro-batch 2 --batch 8 --lr 0.01 --seed 7"
tables='/^  ranks  /,/^$/d'
steps=20 kinds='processes threads'
if [ "$slowdown" -gt 1 ]; then steps=3 kinds=threads; fi

# sent NAME: elements per rank and step, from the table.
sent() { grep -A 1 '^  ranks   tp' "$1.all" | awk 'NR == 2 { print $6 }'; }

# shellcheck disable=SC2086
{
    train_with whole "$whole" $run --layers 2 --steps $steps --ranks 1
    [ "$(losses whole | grep -c ^)" -gt $steps ] || fail "not every step printed its loss"
    for ranks in 1 2 4; do
        for tp in 1 2 4; do
            case $ranks$tp in 11 | 22 | 42 | 44) ;; *) continue ;; esac
            for sequence in '' --sequence-parallel; do
                for kind in $kinds; do
                    name=${ranks}by$tp$sequence-$kind flag=
                    if [ $kind = threads ]; then flag=--threads-as-ranks; fi
                    train_with "$name" "$program" $run --layers 2 --steps $steps --ranks $ranks --tp $tp $sequence $flag
                    close "$name"
                done
                [ "$kinds" = threads ] || same "${ranks}by$tp$sequence-processes" "${ranks}by$tp$sequence-threads"
            done
        done
    done
    for sequence in '' --sequence-parallel; do same 2by2$sequence-threads 4by2$sequence-threads; done # replicas leave no trace
    train_with chunks "$program" $run --layers 2 --steps $steps --ranks 2 --tp 2 --chunks 4
    close chunks
    train_with chunks-sequence "$program" $run --layers 2 --steps $steps --ranks 4 --threads-as-ranks --sequence-parallel --chunks 2
    close chunks-sequence
    # Neither the vocabulary nor the tokens of a sequence divide by three.
    odd="--heads 3 --channels 12 --context 15 --micro-batch 2 --batch 4 --lr 0.01 --layers 1 --steps 3"
    train_with odd "$whole" $odd --ranks 1
    train_with odd3 "$program" $odd --ranks 6 --tp 3 --threads-as-ranks --sequence-parallel --chunks 2
    close odd3 odd
}
# --recompute: the same bits, and less memory.
bytes() { sed -n 's/^  values and activations of rank 0: \([0-9]*\) bytes$/\1/p' "$1.all"; }
# shellcheck disable=SC2086
for sequence in '' --sequence-parallel; do
    train_with recompute "$program" $run --layers 2 --steps $steps --ranks 2 --threads-as-ranks $sequence --recompute
    same 2by2$sequence-threads recompute
    [ "$(bytes recompute)" -lt "$(bytes 2by2$sequence-threads)" ] || fail "$(bytes recompute) bytes with --recompute, $(bytes 2by2$sequence-threads) without"
done
[ "$(sent 1by1-threads)" -eq 0 ] || fail "a group of one rank has sent $(sent 1by1-threads) elements"

# A checkpoint is the global model, for any group that writes it and any that continues: the same weights, and
# the losses of train_gpt.
# shellcheck disable=SC2086
{
    train_with half "$whole" $run --layers 2 --steps 3 --ranks 1 --checkpoint half.ckpt
    train_with rest "$whole" --resume half.ckpt --steps 6 --ranks 1
    train_with two "$program" $run --layers 2 --steps 3 --ranks 2 --tp 2 --checkpoint two.ckpt
    train_with four "$program" --resume two.ckpt --ranks 4 --tp 4 --threads-as-ranks
    train_with one "$whole" --resume two.ckpt --ranks 1
    for name in four one; do
        grep -q 'continues after step 3' $name.out || fail "$name does not report where it continues"
        [ "$(hash_of $name)" = "$(hash_of two)" ] || fail "$name: resumed $(hash_of $name), saved $(hash_of two)"
    done
    train_with there "$program" --resume half.ckpt --steps 6 --ranks 4 --tp 2 --threads-as-ranks --sequence-parallel --checkpoint there.ckpt
    close there rest
    train_with back "$whole" --resume two.ckpt --steps 6 --ranks 1
    close back rest
    train_with drop "$whole" $run --layers 2 --steps 3 --ranks 1 --dropout 0.1 --checkpoint drop.ckpt
    cp half.ckpt damaged.ckpt
    printf 'damage' | dd of=damaged.ckpt bs=1 seek=600 conv=notrunc 2> dd.log || fail "$(cat dd.log)"
}

# Of four micro-batches, 8 b s h (t - 1) / t elements per block, b s = 32 tokens, h = 16 channels.
# shellcheck disable=SC2086
for tp in 2 4; do
    train_with one "$program" $run --layers 1 --steps 1 --ranks $tp --tp $tp
    train_with three "$program" $run --layers 3 --steps 1 --ranks $tp --tp $tp
    [ $(($(sent three) - $(sent one))) -eq $((4 * 2 * 8 * 32 * 16 * (tp - 1) / tp)) ] || fail "--tp $tp: $(sent three) and $(sent one) elements for 3 blocks and 1"
done

before=$(state)
# shellcheck disable=SC2086
{
    wrong "--heads 4 is not a multiple of --tp 3; use --tp 1" $run --ranks 3 --tp 3 text
    wrong "--tp 3 does not divide 4 ranks; use --tp 2" $run --ranks 4 --tp 3 text
    wrong "--heads 2 is not a multiple of --tp 4; use --tp 2" $run --heads 2 --ranks 4 --tp 4 text
    wrong "use --context 16" $run --micro-batch 1 --context 15 --ranks 2 --tp 2 --sequence-parallel text
    wrong "use --batch 4" $run --batch 6 --ranks 4 --tp 2 text
    wrong "use --channels 16" $run --channels 15 --ranks 2 --tp 2 text
    wrong "--tp 0: give an integer from 1 to 65536" $run --tp 0 text
    wrong "--chunks 0: give an integer from 1 to 64" $run --chunks 0 text
    wrong "--sequence-parallel takes no value" $run --sequence-parallel=2 text
    wrong "--recompute takes no value" $run --recompute=1 text
    wrong "unknown flag --pp" $run --pp 2 text
    wrong "No such file" $run --ranks 2 --tp 2 missing
    wrong "cannot be written" $run --ranks 2 --checkpoint missing/new.ckpt text
    wrong "drop.ckpt was trained with --dropout 0.1, which train_gpt_tensor does not have" --ranks 2 --resume drop.ckpt text
    wrong "damaged" --ranks 2 --resume damaged.ckpt text
    wrong "use --tp 1" --ranks 3 --resume half.ckpt --tp 3 text
}
echo "train_gpt_tensor: the losses of train_gpt on 1, 2 and 4 tensor ranks, to the end: $(losses whole | tail -n 1)"

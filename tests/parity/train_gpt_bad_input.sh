#!/bin/sh
# Any invalid input: exit status 1, one sentence on stderr with the remedy, and no file is created or changed.
# usage: train_gpt_bad_input.sh path/of/train_gpt
. "$(dirname "$0")/../support/train_gpt.sh"
failures=0

seq 1 400 > text
seq 1 401 > other
: > empty
printf 'too short' > short
mkdir folder nothing
tiny="--layers 1 --heads 2 --channels 16 --context 16 --batch 8 --micro-batch 2 --steps 2"
# shellcheck disable=SC2086
timeout "$limit" "$program" $tiny --ranks 2 --checkpoint good.ckpt text > good.out 2>&1 || { cat good.out; exit 1; }
size=$(wc -c < good.ckpt)
head -c $((size / 2)) good.ckpt > half.ckpt
head -c 20 good.ckpt > stub.ckpt
{ head -c $((size / 2)) good.ckpt; printf 'damage'; tail -c +$((size / 2 + 7)) good.ckpt; } > damaged.ckpt
[ "$(wc -c < damaged.ckpt)" -eq "$size" ] || { echo "FAILED: damaged.ckpt has another size" >&2; exit 1; }
echo 'drawn before' > loss.svg
rm good.out

before=$(state)

# wrong EXPECTED FLAGS...: is refused; all that are not are counted.
wrong() {
    refused "$@"
    shift
    [ -z "$problem" ] && return
    failures=$((failures + 1))
    echo "FAILED: $*: $problem: $output" >&2
}

# shellcheck disable=SC2086
for ranks in 1 2; do
    small="$tiny --ranks $ranks"
    wrong "No such file" $small missing
    wrong "has no text" $small empty
    wrong "has no text" $small nothing
    wrong "has no text" $small text empty
    wrong "give more text or use a shorter --context" $small short
    wrong "use --batch" $small --batch 7 text
    wrong "use --channels 14" $small --channels 15 text
    wrong "--channels 2" $small --channels 1 text
    wrong "cannot be written" $small --checkpoint missing/new.ckpt text
    wrong "cannot be written" $small --checkpoint folder text
    wrong "was trained with --layers 1, not 2" $small --layers 2 --resume good.ckpt text
    wrong "was trained with --channels 16, not 32" $small --channels 32 --resume good.ckpt --checkpoint good.ckpt text
    wrong "was trained with --batch 8, not 16" $small --batch 16 --resume good.ckpt text
    wrong "other text" $small --resume good.ckpt other
    wrong "use --steps 2 or more" $small --steps 1 --resume good.ckpt text
    wrong "truncated" $small --resume half.ckpt --checkpoint half.ckpt text
    wrong "truncated" $small --resume stub.ckpt text
    wrong "damaged" $small --resume damaged.ckpt --checkpoint damaged.ckpt text
    wrong "not a checkpoint" $small --resume text text
    wrong "not a checkpoint" $small --resume folder text
    wrong "not a checkpoint" $small --resume empty text
    wrong "No such file" $small --resume missing.ckpt text
done
wrong "use --batch 8" --ranks 4 --micro-batch 2 --batch 6 --context 16 text
wrong "use --batch 8" --ranks 2 --micro-batch 2 --batch 12 --context 16 text # 3 micro-batches each: no tree of pairs
wrong "unknown flag --epochs" --epochs 3 text
wrong "unknown flag -h" -h
wrong "--steps needs a value" text --steps
wrong "--help takes no value" --help=1
for value in 0 -1 two 1.5 99999999999999999999 '' ' '; do wrong "give an integer from 1 to" --steps "$value" text; done
for value in 0 -1 x nan inf 11; do wrong "give a number from" --lr "$value" text; done
for value in 1 -0.1 x nan; do wrong "give a number from 0 to 0.99" --dropout "$value" text; done
wrong "give an integer from 1 to 64" --ranks 65 text
wrong "--checkpoint needs" --checkpoint '' text

# loss.svg cannot be replaced: found before training, not after it.
rm loss.svg
mkdir loss.svg
before=$(state)
# shellcheck disable=SC2086
wrong "loss.svg cannot be written" $tiny --checkpoint good.ckpt text

[ $failures -eq 0 ] || exit 1
echo "train_gpt: every wrong input is one sentence and changes nothing"

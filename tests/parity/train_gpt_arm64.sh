#!/bin/sh
# On arm64 too, the same global batch ends with the same weights, bit for bit, on 1, 2 and 4 ranks, as
# processes and as threads, and with ZeRO-3 and a pipeline.
#   usage: train_gpt_arm64.sh QEMU FOLDER      the trainers are FOLDER/arm64.train_gpt, ...
set -u
qemu=$1 folder=$2
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
fail() { echo "FAILED: $*" >&2; exit 1; }

# qemu refuses programs for other machines: the program was for arm64.
for name in train_gpt train_gpt_fsdp train_gpt_pipeline; do
    machine=$(od -An -tu2 -j18 -N2 "$folder/arm64.$name" | tr -d ' ')
    [ "$machine" = 183 ] || fail "$name is for machine $machine, not for arm64 (183)"
done

seq 1 500 > text
hash= # of the first run
train() { # NAME FLAGS...
    name=$1
    shift
    timeout 150 "$qemu" "$folder/arm64.$name" --layers 2 --heads 2 --channels 32 --context 16 --micro-batch 1 --batch 8 --steps 3 "$@" text > out 2> err ||
        fail "$name $*: status $?: $(cat err)"
    [ "$(grep -c 'gradient norm' out)" -eq 3 ] || fail "$name $*: not every step printed its loss"
    last=$(tail -n 1 out)
    echo "$last" | grep -Eq '^weights hash: [0-9a-f]{16}$' || fail "$name $*: the last line is no hash: $last"
    : "${hash:=$last}"
    [ "$last" = "$hash" ] || fail "$name $*: $last, on one rank $hash"
}
train train_gpt --ranks 1
train train_gpt --ranks 2
train train_gpt --ranks 4
train train_gpt --ranks 4 --threads-as-ranks
train train_gpt_fsdp --ranks 2
train train_gpt_pipeline --ranks 2
echo "arm64: $hash on 1, 2 and 4 ranks, by ZeRO-3 and by a pipeline"

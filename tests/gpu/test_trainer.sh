#!/bin/sh
# examples/gpt/train_gpt_cuda.cu on a GPU, which all ranks share. Ten steps have the losses of train_gpt in f32,
# and similar ones in bf16 and f16. The weights are the same with every strategy on 1, 2 and 4 ranks, with stages,
# without graphs, with recomputation, and in a second run; --tp, --order any and --tied-grads merged have similar
# losses. Checkpoints go to train_gpt and back. With optimizer state in host memory a model steps under a memory
# limit that is too small otherwise.
# usage: test_trainer.sh path/of/train_gpt_cuda path/of/train_gpt [one | many]
#   one    tests of one rank: losses, a second run, no graphs, recomputation, offloading
#   many   tests of 2 and 4 ranks, and checkpoints. Default: both.
# DDP_TEST_SMALL=1: smaller models and only ranks as threads, for the trainer on the fake GPU
# (support/train_gpt_cuda.cu), with DDP_TEST_GPUS=1.
whole=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
part=${3:-all}
. "$(dirname "$0")/../support/train_gpt.sh"

lines=3000
run="--layers 3 --heads 4 --channels 128 --context 64 --micro-batch 2 --batch 8 --lr 0.003 --seed 7 --steps 10"
large="--layers 8 --heads 8 --channels 512 --context 64 --micro-batch 2 --batch 2 --steps 4 --strategy none"
first="--layers 1 --steps 1"
processes=
if [ -n "${DDP_TEST_SMALL:-}" ]; then
    run="--layers 3 --heads 4 --channels 32 --context 16 --micro-batch 2 --batch 8 --lr 0.003 --seed 7 --steps 4"
    large="--layers 4 --heads 2 --channels 256 --context 8 --micro-batch 1 --batch 1 --steps 2 --strategy none"
    first="$run --layers 1 --steps 1"
    processes=--threads-as-ranks
    lines=300 # as many validation windows as the fake machine's trainer looks at
fi
seq 1 $lines > text
tables='/^  ranks  /,/^$/d; /^---/,/^---/d'
# shellcheck disable=SC2086
timeout 60 "$program" $first text > first.out 2> first.err || {
    grep -Eq 'there is no device|cudaGetDeviceCount' first.err && { cat first.err; exit 77; }
    fail "the first run: $(cat first.err)"
}

same_hash() { [ "$(hash_of "$1")" = "$(hash_of "$2")" ] || fail "$1 ends with $(hash_of "$1"), $2 with $(hash_of "$2")"; }
# near NAME AS HOW: losses that differ by HOW at most.
near() {
    losses "$1" > "$1.losses"
    losses "$2" > as.losses
    paste as.losses "$1.losses" | awk -v how="$3" 'NF != 2 || $1 - $2 > how || $2 - $1 > how { bad = 1 } END { exit bad || !NR }' ||
        { paste as.losses "$1.losses" >&2; fail "$1: losses are not near those of $2"; }
}

# shellcheck disable=SC2086
one_rank() {
    train_with f32 "$program" $run --dtype f32
    near f32 whole 0.0002
    near one whole 0.03
    train_with f16 "$program" $run --dtype f16
    near f16 one 0.03
    train_with again "$program" $run --strategy none
    train_with plain "$program" $run --strategy none --no-graphs
    train_with recomputed "$program" $run --strategy none --recompute
    train_with full1 "$program" $run
    for way in again plain recomputed full1; do same_hash one $way; done

    # A memory limit that only --offload fits in.
    train_with offloaded "$program" $run --strategy none --offload
    same_hash one offloaded
    before=$(state)
    refused "use --recompute, --offload, --offload-params or a smaller --micro-batch" $large --offload --memory-limit 1 text
    [ -z "$problem" ] || fail "a GPU that is too small: $problem: $output"
    needed=$(printf '%s\n' "$output" | sed -n 's/.* 1 rank(s) need \([0-9]*\).*/\1/p')
    limit_mib=$((needed + 1))
    refused "too small" $large --memory-limit $limit_mib text
    [ -z "$problem" ] || fail "under $limit_mib MiB: $problem: $output"
    train_with limited "$program" $large --memory-limit $limit_mib --offload
    train_with free "$program" $large
    same_hash limited free
}
# shellcheck disable=SC2086
many_ranks() {
    for ranks in 2 4; do
        for strategy in full grad optim none; do
            kind=--threads-as-ranks
            if [ $ranks = 2 ]; then kind=$processes; fi
            train_with "$strategy$ranks" "$program" $run --strategy $strategy --ranks $ranks $kind
            same_hash one "$strategy$ranks"
        done
    done
    train_with stages "$program" $run --stages 2 $processes
    train_with mesh "$program" $run --stages 2 --ranks 4 --schedule GPipe $processes
    same_hash one stages
    same_hash one mesh
    train_with merged "$program" $run --tied-grads merged
    train_with merged4 "$program" $run --tied-grads merged --ranks 4 --threads-as-ranks
    train_with any "$program" $run --order any --reduce-dtype bf16 --ranks 2 $processes
    near merged one 0.03
    same_hash merged merged4
    near any one 0.03
    train_with cut "$program" $run --dtype f32 --tp 2 $processes
    train_with cut_mesh "$program" $run --dtype f32 --tp 2 --stages 2 --threads-as-ranks
    near cut whole 0.0002
    same_hash cut cut_mesh

    train_with saved "$program" $run --dtype f32 --ranks 2 $processes --checkpoint here.ckpt
    train_with end "$whole" --resume here.ckpt --steps 12 --ranks 1
    train_with end_here "$program" --resume here.ckpt --steps 12 --dtype f32
    near end_here end 0.0002
}
# shellcheck disable=SC2086
train_with whole "$whole" $run --ranks 1
# shellcheck disable=SC2086
train_with one "$program" $run --strategy none
[ "$part" = many ] || one_rank
[ "$part" = one ] || many_ranks
echo "trainer: $(hash_of one)"

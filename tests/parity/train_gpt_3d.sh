#!/bin/sh
# The trainer on a mesh of stages x shards x tensor ranks prints the losses of train_gpt, within 1e-4, on
# every mesh of up to eight ranks, as processes, as threads and under mpirun. Stages and shards do not change
# the weights. A checkpoint continues on another mesh. Invalid input is one sentence.
# usage: train_gpt_3d.sh path/of/train_gpt_3d, with train_gpt of the same flavour in the same folder
. "$(dirname "$0")/../support/train_gpt.sh"
whole=$(dirname "$program")/$(basename "$program" | sed 's/_3d//')

seq 1 300 > text # short: the run goes through several epochs
# With three blocks of this size each of two stages has one or two.
run="--heads 4 --channels 16 --context 16 --micro-batch 2 --batch 16 --lr 0.01 --seed 7 --layers 3"
tables='/^  ranks  /,/^$/d'
steps=10 kinds='processes threads'
if [ "$slowdown" -gt 1 ]; then steps=3 kinds=threads; fi

# mesh NAME PP DP TP FLAGS...
mesh() {
    as=$1 pp=$2 dp=$3 tp=$4
    shift 4
    # shellcheck disable=SC2086
    train_with "$as" "$program" "$@" --pp $pp --dp $dp --tp $tp
}
same_hash() { [ "$(hash_of "$1")" = "$(hash_of "$2")" ] || fail "$1 ends with $(hash_of "$1"), $2 with $(hash_of "$2")"; }

# --- every mesh ---

# shellcheck disable=SC2086
{
    train_with whole "$whole" $run --steps $steps --ranks 1
    [ "$(losses whole | grep -c ^)" -gt $steps ] || fail "not every step printed its loss"
    for axes in '1 1 1' '2 1 1' '1 2 1' '1 1 2' '2 2 1' '2 1 2' '2 2 2'; do
        for kind in $kinds; do
            flag=
            if [ $kind = threads ]; then flag=--threads-as-ranks; fi
            mesh "$axes $kind" $axes $run --steps $steps $flag
            close "$axes $kind"
        done
        [ "$kinds" = threads ] || same "$axes processes" "$axes threads"
    done
    for axes in '2 1 1' '1 2 1' '2 2 1'; do same_hash "1 1 1 threads" "$axes threads"; done
    for axes in '2 1 2' '2 2 2'; do same_hash "1 1 2 threads" "$axes threads"; done
    # Four stages, two of them without the tied matrix; tokens sharded by sequence; rows that do not divide.
    mesh deep 4 2 1 $run --steps $steps --threads-as-ranks
    close deep
    same_hash "1 1 1 threads" deep
    mesh sequence 2 2 2 $run --steps $steps --threads-as-ranks --sequence-parallel
    close sequence
    mesh recompute 2 2 2 $run --steps $steps --threads-as-ranks --recompute
    same "2 2 2 threads" recompute
    odd="--heads 3 --channels 12 --context 15 --micro-batch 1 --batch 6 --lr 0.01 --layers 3 --steps 3"
    train_with odd "$whole" $odd --ranks 1
    mesh odd3 2 3 1 $odd --threads-as-ranks
    close odd3 odd
    mesh odd33 1 3 3 $odd --threads-as-ranks --sequence-parallel
    close odd33 odd
}
bytes() { grep -A 1 '^  ranks   pp' "$1.all" | awk 'NR == 2 { print $NF }'; }
[ "$(bytes recompute)" -lt "$(bytes "2 2 2 threads")" ] || fail "$(bytes recompute) bytes with --recompute, $(bytes "2 2 2 threads") without"
if [ "$slowdown" -gt 1 ]; then
    :
elif command -v mpirun > /dev/null; then
    flags= # containers are root, and have fewer cores than ranks
    mpirun --version | grep -q 'Open MPI' && flags="--allow-run-as-root --oversubscribe"
    # A shell around each rank, because mpirun gives ranks a terminal, on which the trainer overwrites lines.
    # shellcheck disable=SC2086,SC2016
    timeout "$limit" mpirun $flags -n 8 sh -c '"$@" > mpi$OMPI_COMM_WORLD_RANK$PMI_RANK.out' sh "$program" $run --steps $steps --pp 2 --tp 2 text \
        > mpi.log 2>&1 || fail "mpirun: $(cat mpi.log)"
    grep -q ' 8 ranks' mpi0.out || fail "not a world of 8 ranks: $(head -n 1 mpi0.out)"
    close mpi0
    same_hash "2 2 2 threads" mpi0
else
    echo "mpirun: not installed, left out"
fi

# --- checkpoints: all the same weights, and the losses of a run that was not interrupted ---

# shellcheck disable=SC2086
{
    train_with half "$whole" $run --steps 3 --ranks 1 --checkpoint half.ckpt
    train_with rest "$whole" --resume half.ckpt --steps 6 --ranks 1
    mesh saved 2 2 2 $run --steps 3 --threads-as-ranks --checkpoint here
    for axes in '1 4 2' '4 1 1' '2 2 2'; do
        mesh "at $axes" $axes --resume here --threads-as-ranks
        grep -q 'continues after step 3' "at $axes.out" || fail "at $axes: it does not report where it continues"
        same_hash "at $axes" saved
        mesh "on $axes" $axes --resume here --steps 6 --threads-as-ranks --checkpoint "there${axes%% *}"
        close "on $axes" rest
    done
    mesh back 2 1 4 --resume there4
    same_hash back "on 4 1 1"
    # Without a step between load and save a checkpoint is unchanged: values and moments of --tp 1 have the
    # same bits after --tp 2 and back.
    mesh uncut 1 2 1 $run --steps 3 --threads-as-ranks --checkpoint uncut
    mesh cut 2 1 2 --resume uncut --threads-as-ranks --checkpoint cut
    mesh joined 1 2 1 --resume cut --threads-as-ranks --checkpoint joined
    same_hash cut uncut
    for file in uncut/*.safetensors; do cmp "$file" "joined/${file#*/}" || fail "$file has other bits after --tp 2"; done
    mesh "uncut goes on" 1 2 1 --resume uncut --steps 6 --threads-as-ranks
    mesh "joined goes on" 1 2 1 --resume joined --steps 6 --threads-as-ranks
    same_hash "joined goes on" "uncut goes on"
}

# --- wrong input ---

mkdir other
echo note > other/note
cp -r here damaged
cp -r here fused
sed -i 's/[.]attn[.]q[.]weight"/.attn.qkv.weight"/' fused/model.safetensors.index.json
data=$(find damaged -name 'model-*.safetensors')
printf 'damage' | dd of="$data" bs=1 seek=$(($(wc -c < "$data") - 64)) conv=notrunc 2> dd.log || fail "$(cat dd.log)"
rm dd.log
before=$(state)
# shellcheck disable=SC2086
{
    wrong "--pp 2 x --dp 2 x --tp 2 are not 4 ranks; use --dp 1" $run --ranks 4 --pp 2 --dp 2 --tp 2 text
    wrong "--pp 3 x --tp 1 does not divide 4 ranks; use --ranks 6" $run --ranks 4 --pp 3 text
    wrong "--pp 8 x --dp 8 x --tp 8 are 512 ranks, but the number of ranks is 1; start that many under mpirun, or use at most 64" $run --pp 8 --dp 8 --tp 8 text
    wrong "--heads 4 is not a multiple of --tp 3; use --tp 2" $run --tp 3 text
    wrong "use --layers 4 or more" $run --pp 6 text
    wrong "use --context 16" $run --micro-batch 1 --context 15 --tp 2 --sequence-parallel text
    wrong "use --batch 16" $run --batch 14 --dp 4 text
    wrong "use --channels 16" $run --channels 15 --pp 2 text
    wrong "--pp 0: give an integer from 1 to 65536" $run --pp 0 text
    wrong "--recompute takes no value" $run --recompute=1 text
    wrong "unknown flag --chunks" $run --chunks 2 text
    wrong "No such file" $run --pp 2 missing
    wrong "it is not a folder" $run --pp 2 --checkpoint text text
    wrong "holds other files" $run --dp 2 --checkpoint other text
    wrong "No such file" --dp 2 --resume missing text
    wrong "use train_gpt_fsdp" --pp 2 --dp 2 --resume fused text
    wrong "checksum" --pp 2 --dp 2 --resume damaged text
    wrong "was trained with --layers 3, not 2" --pp 2 --layers 2 --resume here text
    wrong "use --steps 3 or more" --pp 2 --steps 2 --resume here text
    wrong "use --tp 2" --resume here --tp 3 text
}
echo "train_gpt_3d: the losses of train_gpt on meshes of up to eight ranks, to the end: $(losses whole | tail -n 1)"

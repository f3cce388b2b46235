#!/bin/sh
# The trainer on stages prints the losses of train_gpt and ends with its weights, bit for bit: every schedule,
# on 1, 2, 3 and 4 ranks, as processes and as threads; a few of them with sanitizers. Its checkpoints are those
# of train_gpt. After a kill it continues by itself. Invalid input is one sentence.
# usage: train_gpt_pipeline.sh path/of/train_gpt_pipeline, with train_gpt of the same flavour in the same
# folder
. "$(dirname "$0")/../support/train_gpt.sh"
whole=$(dirname "$program")/$(basename "$program" | sed 's/_pipeline//')

seq 1 300 > text # short: the run goes through several epochs
model="--layers 4 --heads 2 --channels 16 --context 16 --lr 0.01 --seed 7"
run="$model --micro-batch 2"
if [ "$slowdown" -gt 1 ]; then steps=2 ranks_16=2 kinds_12=ZB-V kinds_16=interleaved-1F1B
else
    steps=20 ranks_16="1 2 4"
    kinds_12="naive GPipe looped-BFS ZB-H1 ZB-H2 ZB-V AUTO" kinds_16="interleaved-1F1B interleaved-ZB-1P DualPipeV"
fi

tables='/^  schedule/,/^$/d; /^  ranks  /,/^$/d; /^$/d'

# shellcheck disable=SC2086
{
    train_with sixteen "$whole" $run --batch 16 --steps $steps --ranks 1
    train_with twelve "$whole" $run --batch 12 --steps 2 --ranks 1
    [ "$(grep -c 'gradient norm' sixteen.same)" -ge $steps ] || fail "not every step printed its loss"
    for ranks in $ranks_16; do
        train_with 1f1b "$program" $run --batch 16 --steps $steps --ranks $ranks
        same sixteen 1f1b
    done
    for schedule in $kinds_12; do
        train_with $schedule "$program" $run --batch 12 --steps 2 --ranks 3 --threads-as-ranks --schedule $schedule
        same twelve $schedule
    done
    for schedule in $kinds_16; do
        train_with $schedule "$program" $run --batch 16 --steps $steps --ranks 2 --schedule $schedule --stages 4
        same sixteen $schedule
    done
    train_with stages "$program" $model --batch 16 --steps $steps --ranks 2 --schedule looped-BFS --stages 6 --micro-batches 8
    same sixteen stages
}
grep -q 'predicted bubble' ZB-V.all || fail "no table"
grep -q '^  schedule.svg: ' ZB-V.all || fail "it does not report that it wrote schedule.svg"
grep -q '^  trace.json: ' ZB-V.all || fail "it does not report that it wrote trace.json"
grep -q 'looped-BFS  *2  *6  *8 ' stages.all || fail "not 6 stages and 8 micro-batches: $(cat stages.all)"
grep -q '<svg' schedule.svg || fail "schedule.svg is no picture"
python3 - << 'END' || fail "trace.json is no trace of the last step"
import json
events = [e for e in json.load(open("trace.json"))["traceEvents"] if e["ph"] == "X"]
assert sorted({(e["args"]["stage"], e["args"]["microbatch"]) for e in events}) == [(s, i) for s in range(6) for i in range(8)], "not all of it"
assert {e["tid"] for e in events} == {0, 1} and min(e["ts"] for e in events) == 0 and all(0 <= e["ts"] < 60e6 and 0 < e["dur"] < 60e6 for e in events)
for tid in 0, 1:
    row = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == tid)
    assert all(end <= begin + 0.002 for (_, end), (begin, _) in zip(row, row[1:])), "actions of a rank overlap"
END

# --recompute: the same bits with a split and an unsplit backward, and less memory.
bytes() { grep -A 1 '^  schedule  ' "$1.all" | awk 'NR == 2 { print $NF }'; }
# shellcheck disable=SC2086
for kind in "GPipe 4" "ZB-H1 1"; do
    schedule=${kind% *}
    train_with plain "$program" $run --batch 16 --steps $steps --ranks 2 --schedule $schedule
    train_with recompute "$program" $run --batch 16 --steps $steps --ranks 2 --schedule $schedule --recompute
    same sixteen plain
    same sixteen recompute
    [ "$(bytes recompute)" -lt $(($(bytes plain) / ${kind#* })) ] || fail "$schedule: $(bytes recompute) bytes with --recompute, $(bytes plain) without"
done

# Dropout has the bits of train_gpt, with a split backward, recomputation and a checkpoint.
# shellcheck disable=SC2086
{
    train_with drop "$whole" $run --batch 12 --steps 4 --ranks 1 --dropout 0.3
    train_with drop_begun "$whole" $run --batch 12 --steps 2 --lr-decay-steps 4 --ranks 1 --dropout 0.3 --checkpoint drop.ckpt
    train_with drop_split "$program" $run --batch 12 --steps 4 --ranks 2 --dropout 0.3 --schedule ZB-H1
    train_with drop_again "$program" --resume drop.ckpt --steps 4 --ranks 3 --threads-as-ranks --schedule GPipe --recompute
    same drop drop_split
    [ "$(hash_of drop_again)" = "$(hash_of drop)" ] || fail "dropout resumed: $(hash_of drop_again), uninterrupted $(hash_of drop)"
}

# --- checkpoints: the file of train_gpt, for any schedule and ranks, and after a kill ---

# shellcheck disable=SC2086
{
    train_with half "$program" $run --batch 12 --steps 2 --lr-decay-steps 5 --ranks 2 --schedule ZB-H1 --checkpoint half.ckpt
    train_with rest "$whole" --resume half.ckpt --steps 5 --ranks 1 --checkpoint whole.ckpt
    train_with on "$program" --resume half.ckpt --steps 5 --ranks 3 --schedule ZB-V --threads-as-ranks --recompute --checkpoint on.ckpt
    train_with begun "$whole" $run --batch 12 --steps 2 --lr-decay-steps 5 --ranks 1 --checkpoint begun.ckpt
    train_with back "$program" --resume begun.ckpt --steps 5 --ranks 1 --micro-batches 6 --checkpoint back.ckpt
    for name in on back; do
        grep -q 'continues after step 2' $name.out || fail "$name does not report where it continues"
        [ "$(hash_of $name)" = "$(hash_of rest)" ] || fail "$name: resumed $(hash_of $name), train_gpt $(hash_of rest)"
        cmp whole.ckpt $name.ckpt || fail "$name.ckpt is not the file of train_gpt"
    done
    train_with uncut "$whole" $run --batch 8 --steps 100 --ranks 1
    attempt=0
    until grep -qs '^restart 1: killed.ckpt$' killed.out; do # on a loaded machine a run can end before the kill
        attempt=$((attempt + 1))
        [ $attempt -le 10 ] || fail "no restart in ten runs: $(cat killed.out)"
        rm -f killed.ckpt
        timeout "$limit" "$program" $run --batch 8 --steps 100 --ranks 2 --restarts 1 --resume auto --checkpoint killed.ckpt text > killed.out 2> killed.err &
        pid=$!
        while [ ! -e killed.ckpt ] && kill -0 $pid 2> /dev/null; do sleep 0.01; done
        launch=$(pgrep -P $pid | head -n 1)
        pgrep -P "${launch:-0}" | tail -n 1 | xargs -r kill -9 2> /dev/null
        wait $pid || fail "after a kill of a rank: $(cat killed.err)"
    done
    [ "$(hash_of killed)" = "$(hash_of uncut)" ] || fail "after a kill: $(hash_of killed), uninterrupted $(hash_of uncut)"
}

# A custom list, as a spreadsheet writes it: rank 1 runs micro-batches in another order, I and W are separate.
printf '\357\273\277"0F0","0F1","0F2","0F3","0B1","0B0","0B3","0B2"\r\n1F0,1F1,1I1,1I0,1W0,1W1,,1F3,1B3,1F2,1B2\r\n' > own.csv
# shellcheck disable=SC2086
{
    train_with eight "$whole" $run --batch 8 --steps $steps --ranks 1
    train_with own "$program" $run --steps $steps --ranks 2 --schedule own.csv --offload saved
    same eight own
    mkdir lists
    cp own.csv lists/no_ending
    train_with folder "$program" $run --batch 8 --steps $steps --ranks 2 --threads-as-ranks --schedule lists/no_ending
    same eight folder
}
grep -q '^  own.csv  *2  *2  *4 ' own.all || fail "no table for own.csv: $(cat own.all)"
grep -q '^  no_ending  *2  *2  *4 ' folder.all || fail "no table for lists/no_ending: $(cat folder.all)"

printf '0F0,0B0\n1F0,,1X0\n' > cell.csv
printf '0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1I1,1W0\n' > check.csv
printf '0F0,0B0\n1B0,1F0\n' > order.csv
printf '0F0,0B0\n1F0,1B0\n' > fine.csv
printf '0F0,0B0\n1F0\0,1B0\n' > zero.csv
: > empty.csv
mkfifo pipe.csv
mkdir held.csv
head -c 600 half.ckpt > short.ckpt
before=$(state)
# shellcheck disable=SC2086
{
    wrong "--offload params: give none or saved" --ranks 2 --offload params $run text
    wrong "use one of them" --ranks 2 --offload saved --recompute $run text
    wrong "truncated" --ranks 2 --resume short.ckpt text
    wrong "other text" --ranks 2 --resume half.ckpt text text
    wrong "was trained with --batch 12, not 8" --ranks 2 --batch 8 --resume half.ckpt text
    wrong "--micro-batches 4 of --micro-batch 2 are not --batch 12" --ranks 2 --micro-batches 4 --resume half.ckpt text
    wrong "No such file" --ranks 2 --checkpoint missing/new.ckpt $run text
    wrong "--resume auto: set --checkpoint" --ranks 2 --resume auto $run text
    wrong '--schedule cell.csv row 2 cell 3 "1X0": unknown action' $run --ranks 2 --schedule cell.csv text
    wrong "--schedule order.csv row 2 cell 1 1B0: its forward 1F0 comes later" $run --ranks 2 --schedule order.csv text
    wrong "--schedule check.csv row 2 cell 4 1W0: 1B0 of the same stage and micro-batch" $run --ranks 2 --schedule check.csv text
    wrong "--schedule fine.csv has 2 rows, one per rank, but the number of ranks is 3; use --ranks 2" $run --ranks 3 --schedule fine.csv text
    wrong "has 1 micro-batches, but --micro-batches is 4; leave --micro-batches out" $model --ranks 2 --micro-batches 4 --schedule fine.csv text
    wrong "but --batch 16 is not 1 times --micro-batch 2; leave --batch out" $run --batch 16 --ranks 2 --schedule fine.csv text
    wrong "fine.csv has 2 stages; leave --stages out" $run --ranks 2 --stages 4 --schedule fine.csv text
    wrong "--schedule missing.csv cannot be read: No such file" $run --ranks 2 --schedule missing.csv text
    wrong "--schedule ./1F1B cannot be read: No such file" $run --ranks 2 --schedule ./1F1B text
    wrong "--schedule held.csv is not a file" $run --ranks 2 --schedule held.csv text
    wrong "--schedule pipe.csv is not a file" $run --ranks 2 --schedule pipe.csv text
    wrong "--schedule zero.csv has a zero byte" $run --ranks 2 --schedule zero.csv text
    wrong "--schedule empty.csv: ddp_schedule_parse: csv is empty" $run --ranks 2 --schedule empty.csv text
    wrong "is not a schedule" $run --ranks 2 --schedule 2F2B text
    wrong "delayed weights" $run --ranks 2 --schedule PipeDream text
    wrong "use --layers 6 or more" $run --ranks 4 --stages 8 --schedule looped-BFS text
    wrong "use --batch 6" $run --ranks 2 --batch 7 text
    wrong "--stages 5 is not a multiple of 2 ranks; use --stages 4" $run --ranks 2 --stages 5 text
    wrong "--stages 1 is not a multiple of 2 ranks; use --stages 2" $run --ranks 2 --stages 1 text
    wrong "--recompute takes no value" $run --recompute=1 text
    wrong "unknown flag --chunks" $run --ranks 2 --chunks 2 text
    wrong "chunk_count=2, but 1F1B has 1" $run --ranks 2 --stages 4 text
    wrong "--batch 16 does not split into --micro-batches 3; use --batch 18" $model --ranks 2 --batch 16 --micro-batches 3 text
    wrong "--micro-batches 4 of --micro-batch 2 are not --batch 16; leave one of the three out" $run --ranks 2 --batch 16 --micro-batches 4 text
    wrong "exceed the maximum of --batch, 1000000" $run --ranks 2 --micro-batches 600000 text
    for value in 0 -2 two 1.5 99999999999; do
        wrong "give an integer from 1 to" --stages "$value" text
        wrong "give an integer from 1 to" --micro-batches "$value" text
    done
}
mkdir -p held
mv schedule.svg trace.json held
mkdir trace.json
before=$(state)
# shellcheck disable=SC2086
wrong "trace.json cannot be written" $run --ranks 2 text
echo "train_gpt_pipeline: every schedule has the bits of train_gpt: $(grep '^weights hash' sixteen.out)"

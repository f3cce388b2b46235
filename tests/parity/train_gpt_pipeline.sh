#!/bin/sh
# The trainer on stages prints the losses of train_gpt and ends with its weights, bit for bit: every schedule, on 1, 2, 3 and 4 ranks, as processes and as
# threads; a few of them under sanitizers. Wrong input is one sentence.
# usage: train_gpt_pipeline.sh path/of/train_gpt_pipeline, with train_gpt of the same flavour beside it
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
        train_with $schedule "$program" $run --batch 16 --steps $steps --ranks 2 --schedule $schedule --chunks 2
        same sixteen $schedule
    done
    train_with stages "$program" $model --batch 16 --steps $steps --ranks 2 --schedule looped-BFS --stages 6 --micro-batches 8
    same sixteen stages
}
grep -q 'bubble predicted' ZB-V.all || fail "no table"
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

before=$(state)
# shellcheck disable=SC2086
{
    wrong "no schedule is called" $run --ranks 2 --schedule 2F2B text
    wrong "delayed weights" $run --ranks 2 --schedule PipeDream text
    wrong "use --layers 6 or more" $run --ranks 4 --chunks 2 --schedule looped-BFS text
    wrong "use --batch 6" $run --ranks 2 --batch 7 text
    wrong "--stages 5 do not lie evenly on 2 ranks; use --stages 4" $run --ranks 2 --stages 5 text
    wrong "--stages 1 do not lie evenly on 2 ranks; use --stages 2" $run --ranks 2 --stages 1 text
    wrong "--stages 4 on 2 ranks are not --chunks 1; leave one of them out" $run --ranks 2 --stages 4 --chunks 1 text
    wrong "chunk_count=2, 1F1B has 1" $run --ranks 2 --stages 4 text
    wrong "--batch 16 does not split into --micro-batches 3; use --batch 18" $model --ranks 2 --batch 16 --micro-batches 3 text
    wrong "--micro-batches 4 of --micro-batch 2 are not --batch 16; leave one of the three out" $run --ranks 2 --batch 16 --micro-batches 4 text
    wrong "are more than 1000000" $run --ranks 2 --micro-batches 600000 text
    for value in 0 -2 two 1.5 99999999999; do
        wrong "give a whole number from 1 to" --stages "$value" text
        wrong "give a whole number from 1 to" --micro-batches "$value" text
        wrong "give a whole number from 1 to" --chunks "$value" text
    done
}
mkdir -p held
mv schedule.svg trace.json held
mkdir trace.json
before=$(state)
# shellcheck disable=SC2086
wrong "trace.json cannot be written" $run --ranks 2 text
echo "train_gpt_pipeline: every schedule has the bits of train_gpt: $(grep '^weights hash' sixteen.out)"

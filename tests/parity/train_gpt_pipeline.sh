#!/bin/sh
# The trainer on stages prints the losses of train_gpt and ends with its weights, bit for bit: every schedule, on 1, 2, 3 and 4 ranks, as processes and as
# threads. Wrong input is one sentence.
# usage: train_gpt_pipeline.sh path/of/train_gpt_pipeline, with train_gpt of the same flavour beside it
. "$(dirname "$0")/../support/train_gpt.sh"
whole=$(dirname "$program")/$(basename "$program" | sed 's/_pipeline//')

seq 1 300 > text # short: the run goes through several epochs
run="--layers 4 --heads 2 --channels 16 --context 16 --micro-batch 2 --lr 0.01 --seed 7"

tables='/^  schedule/,/^$/d; /^  ranks  /,/^$/d; /^$/d'

# shellcheck disable=SC2086
{
    train_with sixteen "$whole" $run --batch 16 --steps 20 --ranks 1
    train_with twelve "$whole" $run --batch 12 --steps 8 --ranks 1
    [ "$(grep -c 'gradient norm' sixteen.same)" -ge 20 ] || fail "not every step printed its loss"
    for ranks in 1 2 4; do
        train_with 1f1b$ranks "$program" $run --batch 16 --steps 20 --ranks $ranks
        same sixteen 1f1b$ranks
    done
    for schedule in naive GPipe looped-BFS ZB-H1 ZB-H2 ZB-V AUTO; do
        train_with $schedule "$program" $run --batch 12 --steps 8 --ranks 3 --threads-as-ranks --schedule $schedule
        same twelve $schedule
    done
    for schedule in interleaved-1F1B interleaved-ZB-1P DualPipeV; do
        train_with $schedule "$program" $run --batch 16 --steps 20 --ranks 2 --schedule $schedule --chunks 2
        same sixteen $schedule
    done
}
grep -q 'bubble predicted' ZB-H1.all || fail "no table"
grep -q '<svg' schedule.svg || fail "schedule.svg is no picture"
grep -q '"traceEvents"' trace.json || fail "trace.json is no trace"

before=$(state)
# shellcheck disable=SC2086
{
    wrong "no schedule is called" $run --ranks 2 --schedule 2F2B text
    wrong "delayed weights" $run --ranks 2 --schedule PipeDream text
    wrong "use --layers 6 or more" $run --ranks 4 --chunks 2 --schedule looped-BFS text
    wrong "use --batch 6" $run --ranks 2 --batch 7 text
}
echo "train_gpt_pipeline: every schedule has the bits of train_gpt: $(grep '^weights hash' sixteen.out)"

#!/bin/sh
# The trainer on stages prints the losses of train_gpt and ends with its weights, bit for bit: every schedule, on 1, 2, 3 and 4 ranks, as processes and as
# threads. Wrong input is one sentence.
# usage: train_gpt_pipeline.sh path/of/train_gpt_pipeline, with train_gpt of the same flavour beside it
. "$(dirname "$0")/../support/train_gpt.sh"
whole=$(dirname "$program")/$(basename "$program" | sed 's/_pipeline//')

seq 1 300 > text # short: the run goes through several epochs
run="--layers 4 --heads 2 --channels 16 --context 16 --micro-batch 2 --lr 0.01 --seed 7"

# train NAME PROGRAM FLAGS...: NAME.out is what was printed, NAME.same what must not depend on ranks and schedule.
train() {
    name=$1
    shift
    timeout "$limit" "$@" text > "$name.all" 2> "$name.err" || fail "$name: status $?: $(cat "$name.err")"
    sed '/^  schedule/,/^$/d; /^  ranks  /,/^$/d; /^$/d' "$name.all" > "$name.out" # without tables
    comparable "$name"
    tail -n 1 "$name.out" | grep -Eq '^weights hash: [0-9a-f]{16}$' || fail "$name: the last line is no hash: $(tail -n 1 "$name.out")"
}
same() { cmp -s "$1.same" "$2.same" || { diff "$1.same" "$2.same" >&2; fail "$1 and $2 differ"; }; }

# shellcheck disable=SC2086
{
    train sixteen "$whole" $run --batch 16 --steps 20 --ranks 1
    train twelve "$whole" $run --batch 12 --steps 8 --ranks 1
    [ "$(grep -c 'gradient norm' sixteen.same)" -ge 20 ] || fail "not every step printed its loss"
    for ranks in 1 2 4; do
        train 1f1b$ranks "$program" $run --batch 16 --steps 20 --ranks $ranks
        same sixteen 1f1b$ranks
    done
    for schedule in naive GPipe looped-BFS ZB-H1 ZB-H2 ZB-V AUTO; do
        train $schedule "$program" $run --batch 12 --steps 8 --ranks 3 --threads-as-ranks --schedule $schedule
        same twelve $schedule
    done
    for schedule in interleaved-1F1B interleaved-ZB-1P DualPipeV; do
        train $schedule "$program" $run --batch 16 --steps 20 --ranks 2 --schedule $schedule --chunks 2
        same sixteen $schedule
    done
}
grep -q 'bubble predicted' ZB-H1.all || fail "no table"
grep -q '<svg' schedule.svg || fail "schedule.svg is no picture"
grep -q '"traceEvents"' trace.json || fail "trace.json is no trace"

# wrong EXPECTED FLAGS...: exit status 1, one sentence on stderr with EXPECTED in it.
wrong() {
    expected=$1
    shift
    output=$(timeout "$limit" "$program" "$@" 2>&1 > /dev/null)
    status=$?
    [ $status -eq 1 ] || fail "$*: status $status: $output"
    [ "$(printf '%s\n' "$output" | wc -l)" -eq 1 ] || fail "$*: not one line: $output"
    case $output in "train_gpt_pipeline: "*"$expected"*) ;; *) fail "$*: no '$expected': $output" ;; esac
}

# shellcheck disable=SC2086
{
    wrong "no schedule is called" $run --ranks 2 --schedule 2F2B text
    wrong "delayed weights" $run --ranks 2 --schedule PipeDream text
    wrong "use --layers 6 or more" $run --ranks 4 --chunks 2 --schedule looped-BFS text
    wrong "use --batch 6" $run --ranks 2 --batch 7 text
}
echo "train_gpt_pipeline: every schedule has the bits of train_gpt: $(grep '^weights hash' sixteen.out)"

#!/bin/sh
# A run resumed from an intermediate checkpoint ends with the bits of the uninterrupted run, on any number of
# ranks. A kill leaves a checkpoint from which a run continues. With --restarts and --resume auto it continues
# by itself, however often a rank is killed.   usage: train_gpt_resume.sh path/of/train_gpt
. "$(dirname "$0")/../support/train_gpt.sh"

# wait_for FILE PID: until FILE exists, while PID runs.
wait_for() {
    tries=0
    while [ ! -e "$1" ]; do
        kill -0 "$2" 2> /dev/null || [ -e "$1" ] || fail "the run ended without $1: $(cat run.err)"
        tries=$((tries + 1))
        [ $tries -lt $((limit * 100)) ] || fail "no $1 after $limit s"
        sleep 0.01
    done
}
hash_of() { grep '^weights hash' "$1"; }

# A short text: the run goes through several epochs, so that the middle is not in the first.
seq 1 300 > text
run="--layers 1 --heads 2 --channels 16 --context 16 --batch 16 --micro-batch 2 --steps 400 --seed 7 --lr 0.01 text"

# The whole run; its first checkpoint is copied as soon as it exists. A rename replaces it, so a copy is
# always complete. On a loaded machine the run can end before the copy; another attempt can succeed.
for attempt in 1 2 3 4 5 6 7 8 9 10; do
    rm -f whole.ckpt
    # shellcheck disable=SC2086
    timeout "$limit" "$program" $run --ranks 2 --checkpoint whole.ckpt > whole.out 2> run.err &
    pid=$!
    wait_for whole.ckpt $pid
    cp whole.ckpt middle.ckpt
    wait $pid || fail "the whole run: $(cat run.err)"
    cmp -s middle.ckpt whole.ckpt || break
    [ $attempt -lt 10 ] || fail "the copy is of the end, not of the middle, ten times"
done
hash=$(hash_of whole.out)

worlds="1 2 4"
if [ "$slowdown" -gt 1 ]; then worlds=2; fi
for ranks in $worlds; do
    # Omitted flags come from the checkpoint.
    timeout "$limit" "$program" --ranks $ranks --resume middle.ckpt --checkpoint again.ckpt text > again.out 2> again.err || fail "$(cat again.err)"
    grep -q 'continues after step' again.out || fail "the run on $ranks ranks does not report where it continues"
    [ "$(hash_of again.out)" = "$hash" ] || fail "resumed on $ranks ranks: $(hash_of again.out), uninterrupted $hash"
    cmp -s again.ckpt whole.ckpt || [ $ranks -ne 2 ] || fail "the last checkpoints differ"
done
# shellcheck disable=SC2086
timeout "$limit" "$program" $run --ranks 2 --threads-as-ranks --resume middle.ckpt > again.out 2> again.err || fail "$(cat again.err)"
[ "$(hash_of again.out)" = "$hash" ] || fail "resumed on threads: $(hash_of again.out), uninterrupted $hash"

# A checkpoint of the end continues for no step, or for more steps at the final learning rate.
timeout "$limit" "$program" --ranks 2 --resume whole.ckpt text > end.out 2> end.err || fail "$(cat end.err)"
[ "$(hash_of end.out)" = "$hash" ] || fail "resumed at the end: $(hash_of end.out), uninterrupted $hash"
timeout "$limit" "$program" --ranks 2 --resume whole.ckpt --steps 410 text > more.out 2> more.err || fail "$(cat more.err)"
[ "$(hash_of more.out)" != "$hash" ] || fail "ten more steps changed nothing"

# The learning rate is that of --lr-decay-steps, also in a run that stops earlier and is continued.
# shellcheck disable=SC2086
{
    timeout "$limit" "$program" $run --ranks 2 --steps 390 --lr-decay-steps 400 --checkpoint early.ckpt > early.out 2> early.err || fail "$(cat early.err)"
    timeout "$limit" "$program" --ranks 1 --resume early.ckpt --steps 400 text > late.out 2> late.err || fail "$(cat late.err)"
}
[ "$(hash_of late.out)" = "$hash" ] || fail "stopped at step 390 and resumed: $(hash_of late.out), uninterrupted $hash"

# With dropout, in the middle of an epoch. --dropout comes from the checkpoint, or from the command line.
# shellcheck disable=SC2086
{
    timeout "$limit" "$program" $run --ranks 2 --steps 30 --dropout 0.3 > drop.out 2> drop.err || fail "$(cat drop.err)"
    timeout "$limit" "$program" $run --ranks 1 --steps 20 --lr-decay-steps 30 --dropout 0.3 --checkpoint drop.ckpt > early.out 2> drop.err || fail "$(cat drop.err)"
    timeout "$limit" "$program" --ranks 4 --resume drop.ckpt --steps 30 text > late.out 2> drop.err || fail "$(cat drop.err)"
    timeout "$limit" "$program" --ranks 2 --resume drop.ckpt --steps 30 --dropout 0 text > none.out 2> drop.err || fail "$(cat drop.err)"
}
[ "$(hash_of late.out)" = "$(hash_of drop.out)" ] || fail "resumed with dropout: $(hash_of late.out), uninterrupted $(hash_of drop.out)"
[ "$(hash_of none.out)" != "$(hash_of drop.out)" ] || fail "--dropout 0 has the hash of --dropout 0.3"

# Killed while it runs, without a chance to tidy up, and resumed.
# shellcheck disable=SC2086
"$program" $run --ranks 1 --checkpoint killed.ckpt > killed.out 2> run.err &
pid=$!
wait_for killed.ckpt $pid
kill -9 $pid
wait $pid 2> /dev/null
timeout "$limit" "$program" --ranks 2 --resume killed.ckpt --checkpoint killed.ckpt text > again.out 2> again.err || fail "after the kill: $(cat again.err)"
[ "$(hash_of again.out)" = "$hash" ] || fail "resumed after a kill: $(hash_of again.out), uninterrupted $hash"

# --restarts: a random rank is killed again and again, on 2 ranks and on 1.
kills=0
for ranks in 2 1; do
    rm -f restarted.ckpt
    # shellcheck disable=SC2086
    timeout "$limit" "$program" $run --ranks $ranks --restarts 99 --resume auto --checkpoint restarted.ckpt > restarted.out 2> run.err &
    pid=$!
    killed=0
    while [ $killed -lt 3 ] && kill -0 $pid 2> /dev/null; do
        launch=$(pgrep -P $pid | head -n 1)
        victim=$(pgrep -P "${launch:-0}" | sed -n "$((killed % ranks + 1))p")
        sleep 0.0$((killed * 3 + 1)) # at the start, or later
        if [ -n "$victim" ] && kill -9 "$victim" 2> /dev/null; then killed=$((killed + 1)); fi
    done
    kills=$((kills + killed))
    wait $pid || fail "$ranks ranks with restarts: $(cat run.err)"
    [ "$(hash_of restarted.out | tail -n 1)" = "$hash" ] || fail "restarted on $ranks ranks: $(cat restarted.out), uninterrupted $hash"
done
[ $kills -ge 2 ] || fail "only $kills ranks were killed"
before=$(state)
# shellcheck disable=SC2086
wrong "--resume auto: set --checkpoint" $run --resume auto
echo "train_gpt: $kills kills of ranks with --restarts; resumed on $worlds ranks and after a kill as if never interrupted: $hash"

#!/bin/sh
# The same binary joins the world of mpirun and of torchrun, with the bits of a run without a launcher.
# torchrun is emulated by its variables; the real one also runs if available (TORCHRUN=path).
# usage: train_gpt_launchers.sh path/of/train_gpt
[ -n "${DDP_TEST_PORT:-}" ] || exec "$(dirname "$1")/with_port" sh "$0" "$@"
. "$(dirname "$0")/../support/train_gpt.sh"

seq 1 3000 > text
tiny="--layers 2 --heads 2 --channels 32 --context 32 --batch 16 --micro-batch 2 --steps 4 text"

# expect NAME: NAME.out ends with the hash of the run without a launcher, printed by one rank only.
expect() {
    [ "$(grep -c '^weights hash' "$1.out")" -eq 1 ] || fail "$1: not one rank printed: $(cat "$1.out" "$1.err")"
    [ "$(grep '^weights hash' "$1.out")" = "$hash" ] || fail "$1: $(grep '^weights hash' "$1.out"), alone it is $hash"
    grep -q ' 2 ranks' "$1.out" || fail "$1: not a world of 2 ranks: $(head -n 1 "$1.out")"
    echo "$1: $hash"
}

# shellcheck disable=SC2086
timeout "$limit" "$program" $tiny --ranks 1 > alone.out 2> alone.err || fail "alone: $(cat alone.err)"
hash=$(tail -n 1 alone.out)

if command -v mpirun > /dev/null; then
    flags=
    mpirun --version | grep -q 'Open MPI' && flags="--allow-run-as-root --oversubscribe"
    # shellcheck disable=SC2086
    timeout "$limit" mpirun $flags -n 2 "$program" $tiny > mpirun.out 2> mpirun.err || fail "mpirun: $(cat mpirun.err)"
    expect mpirun
    # One sentence from one rank, not one from each. A shell around each rank keeps its status: mpirun would
    # end rank 0, which has the sentence, when rank 1 has failed first.
    # shellcheck disable=SC2086,SC2016
    timeout "$limit" mpirun $flags -n 2 sh -c '"$@"; echo $? >> wrong.status' sh "$program" $tiny --batch 3 > wrong.out 2> wrong.err ||
        fail "mpirun: status $?: $(cat wrong.err)"
    [ "$(sort wrong.status | tr '\n' ' ')" = "1 1 " ] || fail "mpirun: --batch 3 gave $(cat wrong.status)"
    [ "$(grep -c '^train_gpt: ' wrong.err)" -eq 1 ] || fail "mpirun: not one sentence: $(cat wrong.err)"
else
    echo "mpirun: not installed, left out"
fi

export MASTER_ADDR=127.0.0.1 MASTER_PORT=$DDP_TEST_PORT WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 GROUP_RANK=0
export TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0
# shellcheck disable=SC2086
RANK=1 LOCAL_RANK=1 timeout "$limit" "$program" $tiny > variables1.out 2> variables1.err &
second=$!
# shellcheck disable=SC2086
RANK=0 LOCAL_RANK=0 timeout "$limit" "$program" $tiny > variables.out 2> variables.err || fail "rank 0 of the variables: $(cat variables.err)"
wait $second || fail "rank 1 of the variables: $(cat variables1.err)"
[ -s variables1.out ] && fail "rank 1 printed: $(cat variables1.out)"
expect variables
unset MASTER_ADDR MASTER_PORT WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK
unset TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS

torchrun=${TORCHRUN:-torchrun}
if command -v "$torchrun" > /dev/null; then
    # shellcheck disable=SC2086
    timeout $((limit * 2)) "$torchrun" --master_port "$DDP_TEST_PORT" --no-python --nproc_per_node 2 "$program" $tiny > torchrun.out 2> torchrun.err || fail "torchrun: $(cat torchrun.err)"
    expect torchrun
else
    echo "torchrun: not installed, left out"
fi

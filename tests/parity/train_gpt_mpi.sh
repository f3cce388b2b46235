#!/bin/sh
# Built with DDP_USE_MPI and started by mpirun, the trainer prints the losses and ends with the weights of
# --ranks 4, bit for bit: on one machine, and on two or four emulated ones.
# usage: train_gpt_mpi.sh path/of/train_gpt
. "$(dirname "$0")/../support/train_gpt.sh"

seq 1 3000 > text
tiny="--layers 2 --heads 2 --channels 32 --context 32 --micro-batch 2 --steps 8 --batch 16 text"

# shellcheck disable=SC2086
timeout "$limit" "$program" $tiny --ranks 4 > ranks.out 2> ranks.err || fail "--ranks 4: $(cat ranks.err)"
comparable ranks
[ "$(grep -c 'gradient norm' ranks.same)" -eq 8 ] || fail "not every step printed its loss"
for block in 64 2 1; do # a shell around each rank, because mpirun gives ranks a terminal, on which the trainer overwrites lines
    # shellcheck disable=SC2086,SC2016
    DDP_TEST_BLOCK=$block timeout "$limit" mpirun -n 4 sh -c '"$@" > mpi$OMPI_COMM_WORLD_RANK.out' sh "$program" $tiny > mpi.log 2>&1 ||
        fail "mpirun, $block ranks to a machine: $(cat mpi.log)"
    grep -q ' 4 ranks' mpi0.out || fail "not a world of 4 ranks: $(head -n 1 mpi0.out)"
    comparable mpi0
    cmp -s ranks.same mpi0.same || { diff ranks.same mpi0.same >&2; fail "mpirun, $block ranks to a machine, and --ranks 4 differ"; }
done
echo "train_gpt: the same bits over MPI: $(tail -n 1 ranks.out)"

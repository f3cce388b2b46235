#!/bin/sh
# More ranks than the local backend supports: 128 over MPI, on four emulated machines of 32, print the losses
# of 1, 2 and 4 ranks and end with their weights, bit for bit.   usage: train_gpt_many.sh path/of/train_gpt
. "$(dirname "$0")/../support/train_gpt.sh"

seq 1 3000 > text
tiny="--layers 1 --heads 2 --channels 16 --context 16 --micro-batch 1 --batch 128 --steps 2"
limit=$((6 * limit)) # mpirun is one process among all that it has started, and on a busy machine takes long to start them
tables='/^  ranks  /,/^$/d'

for ranks in 1 2 4; do # shellcheck disable=SC2086
    train_with ranks$ranks "$program" $tiny --ranks $ranks
    same ranks$ranks ranks1
done
[ "$(grep -c 'gradient norm' ranks1.same)" -eq 2 ] || fail "not every step printed its loss"
# A shell around each rank, because mpirun gives ranks a terminal, on which the trainer overwrites lines.
# shellcheck disable=SC2086,SC2016
DDP_TEST_BLOCK=32 timeout "$limit" mpirun -n 128 sh -c '"$@" > mpi$OMPI_COMM_WORLD_RANK.out' sh "$program" $tiny text > mpi.log 2>&1 ||
    fail "128 ranks: $(cat mpi.log)"
grep -q ' 128 ranks' mpi0.out || fail "not a world of 128 ranks: $(head -n 1 mpi0.out)"
sed -i "$tables" mpi0.out
comparable mpi0
same mpi0 ranks1
echo "$(basename "$program"): the same bits on 128 ranks over MPI: $(hash_of mpi0)"

#!/bin/sh
# Trains on the CPUs of the machines in a hostfile; data travels by Open MPI, within a machine through shared memory.
#   sh examples/deploy/mpirun.sh [HOSTFILE] [arguments of train_gpt]
# It is built here, and every machine must see this folder under the same path (a shared disk) and have Open MPI of the same version.
set -eu
cd "$(dirname "$0")/../.."
hostfile=examples/deploy/hostfile
if [ $# -gt 0 ] && [ -f "$1" ]; then hostfile=$1; shift; fi
mpicc -O3 -march=native -DDDP_USE_MPI examples/gpt/train_gpt.c -o train_gpt -lm -lpthread
# Ranks in blocks, each on a core of its own. Where a network must be chosen: --mca btl_tcp_if_include eth0
exec mpirun --hostfile "$hostfile" --map-by slot --bind-to core ./train_gpt "$@"

#!/bin/sh
# Trains on the CPUs of the machines in a hostfile: Open MPI between machines, shared memory within a machine.
#   sh examples/deploy/mpirun.sh [HOSTFILE] [arguments of train_gpt]
# Every machine needs this folder under the same path (a shared disk) and the same version of Open MPI. The
# program is compiled on this machine.
set -eu
cd "$(dirname "$0")/../.."
hostfile=examples/deploy/hostfile
if [ $# -gt 0 ] && [ -f "$1" ]; then hostfile=$1; shift; fi
mpicc -O3 -march=native -DDDP_USE_MPI examples/gpt/train_gpt.c -o train_gpt -lm -lpthread
# Consecutive ranks share a machine, each on its own core. To select a network: --mca btl_tcp_if_include eth0
exec mpirun --hostfile "$hostfile" --map-by slot --bind-to core ./train_gpt "$@"

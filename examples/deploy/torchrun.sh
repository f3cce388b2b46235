#!/bin/sh
# Starts one rank per GPU on several machines with torchrun: rendezvous over TCP, data over NCCL.
# Run it on every machine:
#   NODES=2 HEAD=node1 sh examples/deploy/torchrun.sh
# HEAD is the host name of one of the machines, the same everywhere. Its torchrun agent listens on PORT.
set -eu
cd "$(dirname "$0")/../.."
nodes=${NODES:?set the number of machines: NODES=2 HEAD=node1 sh examples/deploy/torchrun.sh}
head=${HEAD:?set the name of the first machine: NODES=2 HEAD=node1 sh examples/deploy/torchrun.sh}
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
export NCCL_LAUNCH_ORDER_IMPLICIT=1 # kernels of several groups start in call order (NCCL 2.26)
nvcc -std=c++17 -O3 -arch=native examples/all_reduce_cuda.cu -o all_reduce_cuda -lnccl
exec torchrun --no-python --nnodes "$nodes" --nproc_per_node "$gpus" --rdzv_backend c10d \
    --rdzv_endpoint "$head:${PORT:-29400}" --rdzv_id "${JOB:-ddp}" ./all_reduce_cuda

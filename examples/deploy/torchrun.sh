#!/bin/sh
# Starts one rank per GPU on several machines with torchrun; the ranks meet over TCP, data travels by NCCL. Run it on every machine:
#   NODES=2 HEAD=node1 sh examples/deploy/torchrun.sh
# HEAD is one of the machines, and the same name everywhere; torchrun's agent there serves PORT.
set -eu
cd "$(dirname "$0")/../.."
nodes=${NODES:?say on how many machines this runs: NODES=2 HEAD=node1 sh examples/deploy/torchrun.sh}
head=${HEAD:?say which machine the others find: NODES=2 HEAD=node1 sh examples/deploy/torchrun.sh}
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
export NCCL_LAUNCH_ORDER_IMPLICIT=1 # kernels of several groups start in the order of the calls (NCCL 2.26)
nvcc -std=c++17 -O3 -arch=native examples/all_reduce_cuda.cu -o all_reduce_cuda -lnccl
exec torchrun --no-python --nnodes "$nodes" --nproc_per_node "$gpus" --rdzv_backend c10d --rdzv_endpoint "$head:${PORT:-29400}" \
    --rdzv_id "${JOB:-ddp}" ./all_reduce_cuda

#!/bin/sh
# Measures on a GPU: ddp_cuda.cuh, then GPT-2. About 8 minutes in all.
#   run.sh [--out DIR]             both; results go to DIR, bench/results by default
#   run.sh --kernels [--out DIR]   gpu.jsonl, gpu.txt: each kernel's time and its share of the rate of
#                                  cudaMemcpyAsync; PyTorch's fused AdamW and foreach norm, if it is installed;
#                                  NCCL through ddp against direct NCCL calls, a reducer against none, in a world of 1.
#                                  About a minute
#   run.sh --gpt [...]             gpt.json, gpt.md: GPT-2 by train_gpt_cuda against PyTorch, and its step by
#                                  kernel, each with its share of its limit. First times the algorithms of
#                                  cuBLASLt; gemm_table_124M.txt has the fastest, which the trainer then uses.
#                                  5 minutes, or --minutes N; --dry-run prints the commands. Needs python3
#   run.sh build                   only compile, on a machine without a GPU
# Programs that `sh tests/gpu/run.sh prepare` built are used from build/gpu, or $PROGRAMS_DIR. Those that are
# missing or out of date are built there. Files grow as results come: a run that is cut off leaves them.
# $NVCC and $ARCH are as in tests/gpu/run.sh, $PYTHON is the python that has PyTorch. Status 77: no device.
set -u
cd "$(dirname "$0")/../.." || exit 1
out=bench/results
python=${PYTHON:-python3}
programs=${PROGRAMS_DIR:-build/gpu}
part=both
usage() { sed -n '/^set -u/q; 2,$s/^# \{0,1\}//p' bench/gpu/run.sh; exit 1; }
case ${1:-} in
--kernels | --gpt) part=${1#--}; shift ;;
build) PROGRAMS="bench_gpu bench_gpt" exec sh tests/gpu/run.sh build "${2:-build/gpu-check}" ;;
esac
. tests/gpu/libraries.sh
for program in bench_gpu bench_gpt train_gpt_cuda; do # carried from a machine with other library folders
    [ ! -x "$programs/$program" ] || find_run_libraries "$programs/$program"
done
gpt() { "$python" bench/gpu/gpt.py --programs "$programs" "$@"; }
if [ $part = gpt ]; then gpt "$@"; exit; fi
case ${1:-} in
'') ;;
--out) out=${2:?--out needs a folder} ;;
*) usage ;;
esac

mkdir -p "$out" || exit 1
failed=0
# Both parts are tried, even if one of them fails. gpu.txt grows line by line.
kernels() {
    sh tests/gpu/run.sh programs "$programs" bench_gpu || return 1
    rm -f "$out/gpu.jsonl"
    date -u +%Y-%m-%d >"$out/gpu.txt"
    status_file=$(mktemp) || return 1
    {
        timeout -k 5 "${KERNEL_SECONDS:-150}" "$programs/bench_gpu" "$out/gpu.jsonl" 2>&1
        echo $? >"$status_file"
    } | tee -a "$out/gpu.txt"
    status=$(cat "$status_file")
    rm -f "$status_file"
    if [ "$status" -ne 0 ]; then
        echo "bench_gpu ended with status $status" | tee -a "$out/gpu.txt"
        return "$status"
    fi
    timeout -k 5 90 "$python" bench/gpu/peer_torch.py "$out/gpu.jsonl" 2>&1 | tee -a "$out/gpu.txt"
}
kernels || failed=$?
[ $failed -ne 77 ] || exit 77
if [ $part = both ]; then gpt --out "$out" || { status=$?; [ $failed -ne 0 ] || failed=$status; }; fi
exit $failed

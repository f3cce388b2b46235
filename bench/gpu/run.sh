#!/bin/sh
# Measures on the GPU here: ddp_cuda.cuh, then GPT-2. Some 8 minutes in all.
#   sh bench/gpu/run.sh [--out DIR]             both; results go to DIR, bench/results by default
#   sh bench/gpu/run.sh --kernels [--out DIR]   kernels against the copy bandwidth and, where PyTorch is installed, its fused AdamW and foreach norm;
#                                               NCCL through ddp against bare NCCL, and a reducer against none, in a world of 1: gpu.jsonl, gpu.txt
#   sh bench/gpu/run.sh --gpt [...]             GPT-2 by train_gpt_cuda beside PyTorch, and its step by kernel: gpt.json, gpt.md. 5 minutes, or --minutes N;
#                                               --dry-run prints the commands. Needs python3
#   sh bench/gpu/run.sh build                   only compile, without the bodies of the headers: what a machine without a device can do
# $NVCC names the compiler, $PYTHON the python that has PyTorch. Status 77: there is no device.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=$here/../results
nvcc=${NVCC:-nvcc}
python=${PYTHON:-python3}
target=-arch=native level=-O3
part=both
usage() { sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 1; }
case ${1:-} in
--kernels | --gpt) part=${1#--}; shift ;;
build)
    part=build level=-O0
    target="-Werror all-warnings -Xcompiler -Werror -c -arch=compute_90 -Xcicc -O0 -DDDP_IMPLEMENTATION_INCLUDED -DDDP_CUDA_IMPLEMENTATION_INCLUDED"
    shift
    ;;
esac
if ! command -v "$nvcc" >/dev/null 2>&1; then echo "there is no nvcc; put the CUDA toolkit's bin in PATH, or set NVCC" >&2; exit 1; fi
build=$(mktemp -d) || exit 1
trap 'rm -rf "$build"' EXIT
trap 'exit 130' INT TERM
. "$here/../../tests/gpu/libraries.sh"
has() { printf '#include <%s>\n' "$1" | "$nvcc" -x cu -E - >/dev/null 2>&1; }
nccl=-lnccl
if [ $part = build ]; then has nccl.h; else find_library "$build" nccl nccl.h '[] { int v; return ncclGetVersion(&v) != ncclSuccess; }()'; fi || {
    echo "NCCL is not installed: left out" >&2
    nccl=-DDDP_NO_NCCL
}
[ $part = build ] || find_library "$build" cublasLt cublasLt.h 'cublasLtGetVersion() == 0' || echo "cuBLASLt is not installed: there will be no GPT-2" >&2
gpt() { GPT_NCCL=$nccl "$python" "$here/gpt.py" "$@"; }
if [ $part = gpt ]; then gpt "$@"; exit; fi
case ${1:-} in
'') ;;
--out) out=${2:?--out needs a folder} ;;
*) usage ;;
esac

compile() { # program; the rest are flags
    program=$1
    shift
    timeout -k 5 240 "$nvcc" -std=c++17 $level "$@" -Xcompiler -Wall,-Wextra "$here/$program.cu" -o "$build/$program"
}
if [ $part = build ]; then
    programs="bench_gpu bench_gpt"
    if ! has cublasLt.h; then echo "cuBLASLt is not installed: bench_gpt is left out"; programs=bench_gpu; fi
    for program in $programs; do
        compile $program $target $([ $nccl = -lnccl ] || echo $nccl) || exit 1
        echo "compiled $program"
    done
    exit 0
fi

mkdir -p "$out" || exit 1
failed=0
# Both parts are tried, whatever the other does; gpu.txt grows line by line.
kernels() {
    compile bench_gpu $target $nccl || return 1
    rm -f "$out/gpu.jsonl"
    date -u +%Y-%m-%d >"$out/gpu.txt"
    { timeout -k 5 "${KERNEL_SECONDS:-150}" "$build/bench_gpu" "$out/gpu.jsonl" 2>&1; echo $? >"$build/status"; } | tee -a "$out/gpu.txt"
    status=$(cat "$build/status")
    if [ "$status" -ne 0 ]; then echo "bench_gpu ended with status $status" | tee -a "$out/gpu.txt"; return "$status"; fi
    timeout -k 5 90 "$python" "$here/peer_torch.py" "$out/gpu.jsonl" 2>&1 | tee -a "$out/gpu.txt"
}
kernels || failed=$?
[ $failed -ne 77 ] || exit 77
if [ $part = both ]; then gpt --out "$out" || { status=$?; [ $failed -ne 0 ] || failed=$status; }; fi
exit $failed

#!/bin/sh
# Measures ddp_cuda.cuh on the GPU here, in a few minutes: kernels against the copy bandwidth of the device and, where PyTorch is installed, against
# its fused AdamW and foreach norm; NCCL through ddp against bare NCCL, and a reducer against none, both in a world of 1.
#   sh bench/gpu/run.sh [--out DIR]   gpu.jsonl and gpu.txt go to DIR, bench/results by default
#   sh bench/gpu/run.sh build         only compile the program, without the bodies of the headers: what a machine without a device can do
# $NVCC names the compiler. Status 77: there is no device.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=$here/../results
nvcc=${NVCC:-nvcc}
target=-arch=native level=-O3
case ${1:-} in
'') ;;
build) target="-c -arch=compute_90 -DDDP_IMPLEMENTATION_INCLUDED -DDDP_CUDA_IMPLEMENTATION_INCLUDED" level=-O0 ;;
--out) out=${2:?--out needs a folder} ;;
*) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 1 ;;
esac
if ! command -v "$nvcc" >/dev/null 2>&1; then echo "there is no nvcc; put the CUDA toolkit's bin in PATH, or set NVCC" >&2; exit 1; fi
build=$(mktemp -d) || exit 1
trap 'rm -rf "$build"' EXIT
trap 'exit 130' INT TERM

compile() { "$nvcc" -std=c++17 $level "$@" -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror "$here/bench_gpu.cu" -o "$build/bench_gpu"; }
if printf '#include <nccl.h>\n' | "$nvcc" -x cu -E - >/dev/null 2>&1; then
    compile $target $([ "${1:-}" = build ] || echo -lnccl) || exit 1
else
    echo "NCCL is not installed: left out"
    compile $target -DDDP_NO_NCCL || exit 1
fi
if [ "${1:-}" = build ]; then echo "compiled bench_gpu"; exit 0; fi

mkdir -p "$out" || exit 1
rm -f "$out/gpu.jsonl"
"$build/bench_gpu" "$out/gpu.jsonl" >"$build/table"
status=$?
cat "$build/table"
[ $status -eq 0 ] || exit $status
date -u +%Y-%m-%d >"$out/gpu.txt"
cat "$build/table" >>"$out/gpu.txt"
python3 "$here/peer_torch.py" "$out/gpu.jsonl" >"$build/torch" 2>&1
cat "$build/torch"
cat "$build/torch" >>"$out/gpu.txt"

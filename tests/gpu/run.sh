#!/bin/sh
# Builds the tests that need a GPU with nvcc alone and runs them; prints one table. Nothing is installed or fetched.
#   sh tests/gpu/run.sh             build for the device here and run
#   sh tests/gpu/run.sh build [DIR] only build, for sm_80, sm_90 and PTX: what a machine without a device can do
#   sh tests/gpu/run.sh sanitize    run under compute-sanitizer: memcheck, then racecheck
# $NVCC names the compiler. Status 77: there is no device.
set -u
cd "$(dirname "$0")/../.." || exit 1
mode=${1:-run}
nvcc=${NVCC:-nvcc}
build=${2:-build/gpu}
if ! command -v "$nvcc" >/dev/null 2>&1; then echo "there is no nvcc; put the CUDA toolkit's bin in PATH, or set NVCC" >&2; exit 1; fi
mkdir -p "$build" || exit 1

case $mode in
build) targets='-gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 -gencode arch=compute_90,code=compute_90' ;;
run | sanitize) targets='-arch=native' ;;
*) sed -n '2,6s/^# \{0,1\}//p' tests/gpu/run.sh; exit 1 ;;
esac
# The lists of targets and flags are split into words on purpose. No fused multiply-add on the host: it computes references.
"$nvcc" -std=c++17 -O2 -lineinfo $targets -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror,-ffp-contract=off \
    tests/gpu/test_kernels.cu -o "$build/test_kernels" || exit 1
case $mode in
build) echo "built $build/test_kernels" ;;
run) "$build/test_kernels" ;;
sanitize)
    for tool in memcheck racecheck; do
        echo "== $tool"
        compute-sanitizer --tool $tool --error-exitcode 2 "$build/test_kernels" || exit 1
    done ;;
esac

#!/bin/sh
# Builds the tests that need a GPU with nvcc alone and runs them; prints one table. Nothing is installed or fetched.
#   sh tests/gpu/run.sh [FLAGS]            build for the device here and run: some minutes
#   sh tests/gpu/run.sh sanitize [FLAGS]   run everything, with fewer cases and ranks as threads, under compute-sanitizer: memcheck, racecheck, synccheck
#   sh tests/gpu/run.sh build [DIR]        only build, as PTX that is not optimised: what a machine without a device can do
# FLAGS: --out DIR       as it comes: results.jsonl and log.txt, all that programs print; table.txt at the end. build/gpu by default
#        --only PATTERN  rows of the table that grep -E finds PATTERN in, and the programs that were built before, where they are there
#        --seconds N     in all; rows that do not start until then are not run, which is a failure. 480 by default
# $NVCC names the compiler, $PROGRAMS what `build` builds when it is not all, $ROW_SECONDS what a row may take: 120, the trainer and compute-sanitizer 240.
# What fails, crashes or hangs, or does not compile, leaves the other rows alone. Status 77: there is no device.
set -u
cd "$(dirname "$0")/../.." || exit 1
started=$(date +%s)
nvcc=${NVCC:-nvcc}
build=build/gpu out= only= seconds=480 mode=run
usage() { sed -n '2,11s/^# \{0,1\}//p' tests/gpu/run.sh; exit 1; }
case ${1:-} in
build) mode=build build=${2:-build/gpu} ;;
sanitize) mode=sanitize; shift ;;
esac
while [ $mode != build ] && [ $# -gt 0 ]; do
    [ $# -gt 1 ] || usage
    case $1 in
    --out) out=$2 ;;
    --only) only=$2 ;;
    --seconds) seconds=$2 ;;
    *) usage ;;
    esac
    shift 2
done
out=${out:-$build}
case $seconds in '' | *[!0-9]*) usage ;; esac
if ! command -v "$nvcc" >/dev/null 2>&1; then echo "there is no nvcc; put the CUDA toolkit's bin in PATH, or set NVCC" >&2; exit 1; fi
sanitizer="with compute-sanitizer"
command -v compute-sanitizer >/dev/null 2>&1 || sanitizer="without compute-sanitizer"
if [ "$mode $sanitizer" = "sanitize without compute-sanitizer" ]; then
    echo "there is no compute-sanitizer; put the CUDA toolkit's bin in PATH, or run without the word sanitize" >&2
    exit 1
fi
mkdir -p "$build" "$out" || exit 1

# --- building ---

. tests/gpu/libraries.sh
[ $mode != build ] || only_links=1
mkdir -p "$build/found" || exit 1
found=$(cd "$build/found" && pwd)
nccl=-lnccl
if ! find_library "$found" nccl nccl.h '[] { int v; return ncclGetVersion(&v) != ncclSuccess; }()'; then
    echo "NCCL is not installed: building with DDP_NO_NCCL"
    nccl=-DDDP_NO_NCCL
fi
shares= # NCCL lets ranks share a GPU
as_new='[] { int v; return ncclGetVersion(&v) != ncclSuccess || v < 23000 || NCCL_VERSION_CODE < 23000; }()'
if [ $nccl = -lnccl ] && library_works "$found" nccl nccl.h "$as_new"; then shares=1; fi
cublaslt="-DDDP_USE_CUBLASLT -lcublasLt" # of the layers' products, for test_layers; the model of test_gpt is made of them
gpt="test_attention test_gpt"
if ! find_library "$found" cublasLt cublasLt.h 'cublasLtGetVersion() == 0'; then
    echo "cuBLASLt is not installed: layers by the plain kernel alone, and no GPT"
    cublaslt=
    gpt=test_attention
fi
# program target... [-D...]. No fused multiply-add on the host: it computes references.
compile() {
    program=$1
    source=tests/gpu/${program%_small}.cu
    shift
    case $program in test_layers | test_gpt) set -- "$@" $cublaslt ;; esac
    [ -z "$only" ] || [ ! -x "$build/$program" ] || return 0
    rm -f "$build/$program"
    timeout -k 5 300 "$nvcc" -std=c++17 $level -lineinfo "$@" $strict -Xcompiler -Wall,-Wextra,-ffp-contract=off "$source" \
        -o "$build/$program" $nccl >"$build/$program.log" 2>&1 || failed_to_compile "$program" "$source"
}
failed_to_compile() {
    echo "$2 does not compile:"
    tail -n 15 "$build/$1.log" | cut -c 1-200
    rm -f "$build/$1" # no half of it
    : >"$build/failed"
}
# The trainer on GPUs, and the one on CPUs that it is compared with.
trainer() {
    [ -z "$only" ] || [ ! -x "$build/train_gpt_cuda" ] || [ ! -x "$build/train_gpt" ] || return 0
    rm -f "$build/train_gpt_cuda" "$build/train_gpt"
    timeout -k 5 300 "$nvcc" -std=c++17 -O3 "$@" -Xcompiler -Wall,-Wextra examples/train_gpt_cuda.cu -o "$build/train_gpt_cuda" \
        -lcublasLt $nccl -lpthread -lm >"$build/train_gpt_cuda.log" 2>&1 || failed_to_compile train_gpt_cuda examples/train_gpt_cuda.cu
    "${CC:-cc}" -O3 -march=native examples/train_gpt.c -o "$build/train_gpt" -lm -lpthread >"$build/train_gpt.log" 2>&1 ||
        failed_to_compile train_gpt examples/train_gpt.c
}
rm -f "$build/failed"
level=-O2 strict=
if [ "$mode" = build ]; then # seen to compile and link; tests/compile/matrix.sh has the kernels compiled for sm_90 and as PTX
    level=-O0 strict="-Werror all-warnings -Xcompiler -Werror" # not beside a device: a warning of another compiler must not cost a run there
    programs=${PROGRAMS:-test_kernels test_conformance test_groups test_training test_fsdp test_tensor test_pipeline test_layers $gpt}
    # Kernels are loops on the host, too, and inlining them takes gcc half of its time.
    for program in $programs; do compile $program -arch=compute_90 -Xcicc -O0 "-DDDP__HD=__host__ __device__ inline"; done
    [ ! -f "$build/failed" ] || exit 1
    echo "built $programs in $build"
    exit 0
fi
for program in test_groups test_training test_fsdp test_tensor test_pipeline test_layers $gpt; do compile $program -arch=native & done
compile test_kernels_small -arch=native -DDDP_TEST_SMALL & # for the sanitizers
[ -z "$cublaslt" ] || [ "$mode" = sanitize ] || trainer -arch=native &
if [ "$mode" = sanitize ]; then
    compile test_conformance_small -arch=native -DDDP_TEST_SMALL &
else
    for program in test_conformance test_kernels; do compile $program -arch=native & done
fi
rm -f "$build/kernels.log"
wait
echo "built in $(($(date +%s) - started)) s"

# --- running: one line of the table per program ---

failed=0 rows=0
limit=${ROW_SECONDS:-120}
[ "$mode" = run ] || limit=${ROW_SECONDS:-240}
table=$out/table.txt results=$out/results.jsonl logs=$out/log.txt
: >"$table"
: >"$results"
: >"$logs"
[ ! -f "$build/failed" ] || failed=1
# result seconds: a line of the table, of the console and of the results
tell() {
    printf '%-52s %-14s %4d s\n' "$title" "$1" "$2" | tee -a "$table"
    printf '{"row": "%s", "result": "%s", "seconds": %d}\n' "$title" "$1" "$2" >>"$results"
}
row() { # title log command...
    title=$1 log=$build/$2.log
    shift 2
    [ -z "$only" ] || printf '%s\n' "$title" | grep -Eq -- "$only" || return 0
    rows=$((rows + 1))
    begin=$(date +%s)
    allowed=$((started + seconds - begin))
    if [ $allowed -le 0 ]; then
        failed=1
        tell "NOT RUN, late" 0
        return 0
    fi
    [ $allowed -lt "$limit" ] || allowed=$limit
    if [ "$mode" = sanitize ]; then
        # The library asks after every call; some tests make calls fail on purpose.
        if [ "$tool" = memcheck ]; then set -- --report-api-errors no "$@"; fi
        set -- env DDP_TEST_SANITIZED=1 compute-sanitizer --tool "$tool" --error-exitcode 2 "$@"
    fi
    timeout -k 2 $allowed "$@" >"$log" 2>&1 </dev/null
    status=$?
    took=$(($(date +%s) - begin))
    case $status in
    0) result=ok ;;
    77) [ $rows -gt 1 ] || { cat "$log"; exit 77; }
        result="FAILED (77)" ;;
    124 | 137) result="HUNG, $status" ;;
    127) result="NOT BUILT" ;;
    *) result="FAILED ($status)" ;;
    esac
    { printf '=== %s: %s\n' "$title" "$result"; tail -c 400000 "$log"; } >>"$logs"
    tell "$result" $took
    [ "$result" != ok ] || return 0
    failed=1
    LC_ALL=C tail -n 5 "$log" | LC_ALL=C tr -cd '\11\12\40-\176' | cut -c 1-160 | sed 's/^/    /'
}
finish() {
    printf '\n%s\n' "$(head -n 1 "$build/kernels.log" 2>/dev/null | grep device)"
    cat "$table"
    echo "$(grep -Evc ' (ok|not there)  ' "$table") of $rows rows are not ok; $(($(date +%s) - started)) s with building; $([ "$nccl" = -lnccl ] &&
        echo "with NCCL" || echo "without NCCL"), $sanitizer"
}
trap 'finish; exit 143' TERM INT
# 1 rank runs in the program itself and starts CUDA there: it comes after the launches of processes.
ranks() {
    row "collectives, processes, 2 to 4 ranks on one GPU" conformance_processes "$build/test_conformance" processes 2 3 4 1
    row "collectives, threads, 1 to 4 ranks on one GPU" conformance_threads "$build/test_conformance" threads 1 2 3 4
    row "messages, splits, failures, leaks; processes" groups_processes "$build/test_groups" processes 2 3 4 1
    row "messages, splits, failures, leaks; threads" groups_threads "$build/test_groups" threads 1 2 3 4
    row "training, 1, 2, 4 ranks: the same bits; processes" training_processes "$build/test_training" processes 2 4 1
    row "training, 1, 2, 4 ranks: the same bits; threads" training_threads "$build/test_training" threads 1 2 4
    row "sharded training, 1 to 4 ranks, checkpoints; threads" fsdp_threads "$build/test_fsdp" threads
    row "sharded training, 2 to 4 ranks; processes" fsdp_processes "$build/test_fsdp" processes 2 3 4
    row "tensors, 1 to 4 ranks: the bits of the CPU; threads" tensor_threads "$build/test_tensor" threads
    row "tensors, 1 to 4 ranks: the bits of the CPU; processes" tensor_processes "$build/test_tensor" processes 2 3 4 1
    row "pipelines, 1 to 4 ranks: the bits of the CPU; threads" pipeline_threads "$build/test_pipeline" threads
    row "pipelines, 2 to 4 ranks; processes" pipeline_processes "$build/test_pipeline" processes 2 3 4
    row "layers, 1 to 4 ranks, against the CPU; threads" layers_threads "$build/test_layers" threads
    row "layers, 2 and 3 ranks, against the CPU; processes" layers_processes "$build/test_layers" processes 2 3
    limit=${ROW_SECONDS:-240}
    [ -z "$cublaslt" ] || row "the GPT trainer: 1, 2, 4 ranks, every strategy" trainer sh tests/gpu/test_trainer.sh "$build/train_gpt_cuda" "$build/train_gpt"
    limit=${ROW_SECONDS:-120}
    [ -z "$cublaslt" ] || row "GPT, 1 and 2 ranks, against the CPU; threads" gpt_threads "$build/test_gpt" threads 1 1 2
    [ "$nccl" = -lnccl ] || return 0
    row "NCCL, tree order: collectives, 1 rank" conformance_nccl env DDP_TEST_ENGINE=nccl "$build/test_conformance" threads 1
    row "NCCL, tree order: training, 1 rank" training_nccl env DDP_TEST_ENGINE=nccl "$build/test_training" threads 1
    row "NCCL: sharded training, 1 rank" fsdp_nccl env DDP_TEST_ENGINE=nccl "$build/test_fsdp" threads 1
    row "NCCL: layers, 1 rank" layers_nccl env DDP_TEST_ENGINE=nccl "$build/test_layers" threads 1
    if [ -z "$shares" ]; then echo "NCCL is older than 2.30: no row where its ranks share the GPU"; return 0; fi
    set -- env NCCL_MULTI_RANK_GPU_ENABLE=1 DDP_TEST_ENGINE=nccl
    row "NCCL, tree order: collectives, 2 ranks on one GPU" conformance_shared "$@" "$build/test_conformance" threads 2
    row "NCCL, tree order: training, 2, 4 ranks on one GPU" training_shared "$@" "$build/test_training" threads 2 4
    row "NCCL: training, 2 ranks on one GPU; processes" training_shared2 "$@" "$build/test_training" processes 2
}

if [ "$mode" = sanitize ]; then
    for tool in memcheck racecheck synccheck; do
        row "$tool: kernels against references" kernels_$tool "$build/test_kernels_small"
        row "$tool: training, threads" training_$tool "$build/test_training" threads 1 2 4
        row "$tool: sharded training, threads" fsdp_$tool "$build/test_fsdp" threads 2
        row "$tool: tensors, threads" tensor_$tool "$build/test_tensor" threads 3
        row "$tool: pipelines, threads" pipeline_$tool "$build/test_pipeline" threads 2
        row "$tool: layers, threads" layers_$tool "$build/test_layers" threads 2
        row "$tool: attention against the CPU" attention_$tool "$build/test_attention"
        [ -z "$cublaslt" ] || row "$tool: GPT, threads" gpt_$tool "$build/test_gpt" threads 1 2
    done
    tool=memcheck
    row "memcheck: collectives, threads" conformance_memcheck "$build/test_conformance_small" threads 1 2 3
    row "memcheck: messages, splits, failures; threads" groups_memcheck "$build/test_groups" threads 1 2 3
    [ "$nccl" != -lnccl ] || row "memcheck: NCCL, tree order: training, 1 rank" training_nccl env DDP_TEST_ENGINE=nccl "$build/test_training" threads 1
else
    row "kernels against references" kernels "$build/test_kernels"
    row "attention against the CPU" attention "$build/test_attention"
    ranks
    if [ "$sanitizer" = "with compute-sanitizer" ]; then
        mode=sanitize
        for tool in memcheck racecheck; do row "kernels under compute-sanitizer, $tool" kernels_$tool "$build/test_kernels_small"; done
    else
        printf '%-52s %-12s\n' "kernels under compute-sanitizer" "not there" | tee -a "$table"
    fi
fi
finish
[ $rows -gt 0 ] || { echo "no row has '$only' in it"; exit 1; }
exit $failed

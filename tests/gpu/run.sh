#!/bin/sh
# Builds the tests that need a GPU with nvcc alone and runs them; prints one table. Nothing is installed or fetched.
#   sh tests/gpu/run.sh             build for the device here and run: some minutes
#   sh tests/gpu/run.sh build [DIR] only build, as PTX that is not optimised: what a machine without a device can do
#   sh tests/gpu/run.sh sanitize    run everything, with fewer cases and ranks as threads, under compute-sanitizer: memcheck, racecheck, synccheck
# $NVCC names the compiler, $PROGRAMS what `build` builds when it is not all. Logs lie in build/gpu. Status 77: there is no device.
set -u
cd "$(dirname "$0")/../.." || exit 1
mode=${1:-run}
nvcc=${NVCC:-nvcc}
build=${2:-build/gpu}
if ! command -v "$nvcc" >/dev/null 2>&1; then echo "there is no nvcc; put the CUDA toolkit's bin in PATH, or set NVCC" >&2; exit 1; fi
mkdir -p "$build" || exit 1
case $mode in run | build | sanitize) ;; *) sed -n '2,6s/^# \{0,1\}//p' tests/gpu/run.sh; exit 1 ;; esac

# --- building ---

nccl=-lnccl
if ! printf '#include <nccl.h>\nint main(void) { int v; return ncclGetVersion(&v) != ncclSuccess; }\n' >"$build/nccl.cu" ||
    ! "$nvcc" -Wno-deprecated-gpu-targets "$build/nccl.cu" -lnccl -o "$build/nccl" >"$build/nccl.log" 2>&1; then
    echo "NCCL is not installed: building with DDP_NO_NCCL"
    nccl=-DDDP_NO_NCCL
fi
cublaslt="-DDDP_USE_CUBLASLT -lcublasLt" # of the layers' products, for test_layers; the model of test_gpt is made of them
gpt="test_attention test_gpt"
if ! printf '#include <cublasLt.h>\nint main(void) { return cublasLtGetVersion() == 0; }\n' >"$build/cublaslt.cu" ||
    ! "$nvcc" -Wno-deprecated-gpu-targets "$build/cublaslt.cu" -lcublasLt -o "$build/cublaslt" >"$build/cublaslt.log" 2>&1; then
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
    "$nvcc" -std=c++17 $level -lineinfo "$@" -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror,-ffp-contract=off "$source" -o "$build/$program" $nccl \
        >"$build/$program.log" 2>&1 || { cat "$build/$program.log"; echo "$source does not compile"; : >"$build/failed"; }
}
# The trainer on GPUs, and the one on CPUs that it is compared with.
trainer() {
    "$nvcc" -std=c++17 -O3 "$@" -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror examples/train_gpt_cuda.cu -o "$build/train_gpt_cuda" -lcublasLt $nccl \
        -lpthread -lm >"$build/train_gpt_cuda.log" 2>&1 ||
        { cat "$build/train_gpt_cuda.log"; echo "examples/train_gpt_cuda.cu does not compile"; : >"$build/failed"; }
    "${CC:-cc}" -O3 -march=native examples/train_gpt.c -o "$build/train_gpt" -lm -lpthread || : >"$build/failed"
}
rm -f "$build/failed"
level=-O2
if [ "$mode" = build ]; then # seen to compile and link; tests/compile/matrix.sh has the kernels compiled for sm_90 and as PTX
    level=-O0
    programs=${PROGRAMS:-test_kernels test_conformance test_groups test_training test_fsdp test_tensor test_pipeline test_layers $gpt}
    for program in $programs; do compile $program -arch=compute_90 -Xcicc -O0; done
    [ ! -f "$build/failed" ] || exit 1
    echo "built $programs in $build"
    exit 0
fi
started=$(date +%s)
for program in test_groups test_training test_fsdp test_tensor test_pipeline test_layers $gpt; do compile $program -arch=native & done
compile test_kernels_small -arch=native -DDDP_TEST_SMALL & # for the sanitizers
[ -z "$cublaslt" ] || [ "$mode" = sanitize ] || trainer -arch=native &
if [ "$mode" = sanitize ]; then
    compile test_conformance_small -arch=native -DDDP_TEST_SMALL &
else
    for program in test_conformance test_kernels; do compile $program -arch=native & done
fi
wait
[ ! -f "$build/failed" ] || exit 1

# --- running: one line of the table per program ---

failed=0
table=$build/table.txt
: >"$table"
row() { # title log command...
    title=$1 log=$build/$2.log
    shift 2
    begin=$(date +%s)
    if [ "$mode" = sanitize ]; then
        # The library asks after every call; some tests make calls fail on purpose.
        if [ "$tool" = memcheck ]; then set -- --report-api-errors no "$@"; fi
        set -- env DDP_TEST_SANITIZED=1 compute-sanitizer --tool "$tool" --error-exitcode 2 "$@"
    fi
    timeout 240 "$@" >"$log" 2>&1
    status=$?
    result=ok
    if [ $status -eq 77 ]; then
        cat "$log"
        exit 77
    elif [ $status -ne 0 ]; then
        result="FAILED ($status)"
        failed=1
        tail -n 30 "$log"
    fi
    printf '%-52s %-12s %4d s\n' "$title" "$result" $(($(date +%s) - begin)) | tee -a "$table"
}
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
    [ -z "$cublaslt" ] || row "the GPT trainer: 1, 2, 4 ranks, every strategy" trainer sh tests/gpu/test_trainer.sh "$build/train_gpt_cuda" "$build/train_gpt"
    [ -z "$cublaslt" ] || row "GPT, 1 and 2 ranks, against the CPU; threads" gpt_threads "$build/test_gpt" threads 1 1 2
    [ "$nccl" = -lnccl ] || return 0
    row "NCCL, tree order: collectives, 1 rank" conformance_nccl env DDP_TEST_ENGINE=nccl "$build/test_conformance" threads 1
    row "NCCL, tree order: training, 1 rank" training_nccl env DDP_TEST_ENGINE=nccl "$build/test_training" threads 1
    row "NCCL: sharded training, 1 rank" fsdp_nccl env DDP_TEST_ENGINE=nccl "$build/test_fsdp" threads 1
    row "NCCL: layers, 1 rank" layers_nccl env DDP_TEST_ENGINE=nccl "$build/test_layers" threads 1
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
    sed -n '1p;/checks/p' "$build/kernels.log"
    row "attention against the CPU" attention "$build/test_attention"
    ranks
    if command -v compute-sanitizer >/dev/null 2>&1; then
        mode=sanitize
        for tool in memcheck racecheck; do row "kernels under compute-sanitizer, $tool" kernels_$tool "$build/test_kernels_small"; done
    else
        printf '%-52s %-12s\n' "kernels under compute-sanitizer" "not there" | tee -a "$table"
    fi
fi
printf '\n%s\n' "$(head -n 1 "$build"/kernels*.log | grep device)"
cat "$table"
echo "$(($(date +%s) - started)) s with building; $([ "$nccl" = -lnccl ] && echo "with NCCL" || echo "without NCCL")"
exit $failed

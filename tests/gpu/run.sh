#!/bin/sh
# Builds the tests that need a GPU with nvcc, runs them, and prints one table. Installs and fetches nothing.
# README.md in this folder has the order of calls on a new machine.
#   run.sh [FLAGS]            run the tests on the GPU here; first build missing or outdated programs
#   run.sh sanitize [FLAGS]   run them with fewer cases under compute-sanitizer
#   run.sh shared [FLAGS]     run only those of several ranks on one GPU through NCCL 2.30 or newer. Without
#                             such a library they fail as not run
#   run.sh prepare [DIR]      on a machine without a GPU: build every program for sm_90, and print the files
#                             to carry to the GPU, and their size
#   run.sh build [DIR]        only compile and link, without optimising PTX and most of the host code
#   run.sh programs DIR NAME...   build these programs if they are missing or out of date
# FLAGS: --out DIR       summary.txt (one page), results.jsonl, log.txt (all output); build/gpu/results by
#                        default
#        --only PATTERN  rows whose name or title matches PATTERN (grep -E)
#        --seconds N     time for everything; 540 by default
#        --programs DIR  where the programs are; build/gpu by default
#        --nccl DIR      the folder of libnccl.so.2 to use, such as that of slim_nccl.sh; nccl in the folder of
#                        the programs by default, if that has one
# A row that fails, crashes, hangs or does not compile leaves the other rows alone. Each has its own limit,
# and time is reserved for the rows after it. summary.txt is complete at any moment.
# Status: 0 all rows are ok, 1 some are not, 77 no device.
#   $ARCH          sm_90, native, ...; native by default if nvidia-smi works, otherwise sm_90
#   $NVCC, $CC     the compilers; $JOBS of them at a time
#   $ROW_SECONDS   the limit of every row; $KEPT_SECONDS, reserved for each later row, 8 by default
#   $KIT_MIB       the size that prepare allows, working tree included; 64 by default
set -u
cd "$(dirname "$0")/../.." || exit 1
started=$(date +%s)
nvcc=${NVCC:-nvcc}
build=build/gpu out= only= seconds=540 mode=run slim=
usage() { sed -n '/^set -u/q; 2,$s/^# \{0,1\}//p' tests/gpu/run.sh; exit 1; }
case ${1:-} in
build) mode=build build=${2:-build/gpu-check} ;;
prepare) mode=prepare build=${2:-build/gpu} ;;
programs) mode=programs build=${2:-}; [ $# -gt 2 ] || usage; shift 2 ;;
sanitize | shared) mode=$1; shift ;;
esac
while [ $mode = run ] || [ $mode = sanitize ] || [ $mode = shared ]; do
    [ $# -gt 0 ] || break
    [ $# -gt 1 ] || usage
    case $1 in
    --out) out=$2 ;;
    --only) only=$2 ;;
    --seconds) seconds=$2 ;;
    --programs) build=$2 ;;
    --nccl) slim=$2 ;;
    *) usage ;;
    esac
    shift 2
done
case $seconds in '' | *[!0-9]*) usage ;; esac
sanitizer="with compute-sanitizer"
command -v compute-sanitizer >/dev/null 2>&1 || sanitizer="without compute-sanitizer"
if [ "$mode $sanitizer" = "sanitize without compute-sanitizer" ]; then
    echo "compute-sanitizer is missing: put the CUDA toolkit's bin in PATH, or leave out the word sanitize" >&2
    exit 1
fi
if [ -n "$slim" ] && [ ! -f "$slim/libnccl.so.2" ]; then
    echo "--nccl $slim: libnccl.so.2 is missing; sh tests/gpu/slim_nccl.sh builds one" >&2
    exit 1
fi
slim=${slim:-$build/nccl}
# Before the libraries of PyTorch, which programs name as their run path.
if [ -f "$slim/libnccl.so.2" ]; then
    LD_LIBRARY_PATH=$(realpath "$slim")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH
fi
mkdir -p "$build" || exit 1
temporary=$(mktemp -d) || exit 1
trap 'rm -rf "$temporary"' EXIT
. tests/gpu/libraries.sh

# --- building ---

tests="test_device test_kernels test_attention test_conformance test_training test_fsdp test_gpt"
tests="$tests test_groups test_tensor test_pipeline test_layers"
small="test_kernels_small test_conformance_small"
others="train_gpt_cuda train_gpt train_mlp_cuda bench_gpu bench_gpt llmc"

have_nvcc() {
    command -v "$nvcc" >/dev/null 2>&1 && return 0
    echo "nvcc is missing: put the CUDA toolkit's bin in PATH, or set NVCC" >&2
    return 1
}
# with_libraries PROGRAM...: prints those that can be built with the libraries here.
with_libraries() {
    for program in "$@"; do
        case $program$GPU_CUBLASLT in
        test_gpt | bench_gpt | train_gpt_cuda | train_mlp_cuda) ;;
        *) echo "$program" ;;
        esac
    done
}
# build_missing PROGRAM...: those that are not current.
build_missing() {
    there=
    for program in "$@"; do [ ! -f "$build/$program" ] || there="$there $build/$program"; done
    [ -z "$there" ] || chmod +x $there # a copy from another machine may have lost it
    [ -z "$there" ] || find_run_libraries $there
    missing=
    for program in "$@"; do is_current "$build" "$program" || missing="$missing $program"; done
    [ -n "$missing" ] || return 0
    have_nvcc || return 1
    find_build_libraries "$temporary"
    GPU_ARCH=$(gpu_arch) GPU_LEVEL=kit
    export COMPILE_SECONDS="${COMPILE_SECONDS:-300}" # the later rows need the time
    echo "building$missing for $GPU_ARCH"
    build_programs "$build" $(with_libraries $missing)
}

case $mode in
programs)
    build_missing "$@"
    exit
    ;;
build)
    have_nvcc || exit 1
    only_links=1
    find_build_libraries "$temporary"
    GPU_ARCH=compute_90 GPU_LEVEL=check GPU_BODIES=$temporary/bodies.o GPU_CUDA_BODIES=$temporary/cuda_bodies.o
    export GPU_BODIES GPU_CUDA_BODIES
    # The bodies of the headers once for all programs; tests/compile/matrix.sh has nvcc compile those of ddp.h.
    printf '#define DDP_IMPLEMENTATION\n#include "ddp.h"\n#include "ddp_fsdp.h"\n' >"$temporary/bodies.c"
    printf '#define DDP_CUDA_IMPLEMENTATION\n#include "ddp_cuda.cuh"\n' >"$temporary/cuda_bodies.cu"
    "${CC:-cc}" -O1 -I. -c "$temporary/bodies.c" -o "$GPU_BODIES" &
    "$nvcc" -std=c++17 $(gpu_arch_flags "$GPU_ARCH") -O0 -Xcicc -O0 "-DDDP__HD=__host__ __device__ inline" \
        ${GPU_NCCL:--DDDP_NO_NCCL} $GPU_CUBLASLT -I. -c "$temporary/cuda_bodies.cu" -o "$GPU_CUDA_BODIES" || exit 1
    wait $! || exit 1
    programs=$(with_libraries ${PROGRAMS:-$tests bench_gpu bench_gpt})
    build_programs "$build" $programs || exit 1
    echo "built $(echo $programs) in $build: $(($(date +%s) - started)) s"
    exit 0
    ;;
prepare)
    have_nvcc || exit 1
    only_links=1
    find_build_libraries "$temporary"
    GPU_ARCH=${ARCH:-sm_90} GPU_LEVEL=kit
    stale=
    for program in $(with_libraries $tests $small $others); do
        grep -qs " $GPU_ARCH" "$build/$program.built" && is_current "$build" "$program" && continue
        stale="$stale $program"
    done
    [ -z "$stale" ] || build_programs "$build" $stale || failed=1
    rm -rf "$build/results"
    kit_bytes=$(find "$build" -type f -exec cat {} + | wc -c)
    tree_bytes=0
    if git rev-parse --git-dir >/dev/null 2>&1; then
        tree_bytes=$(git ls-files -z --cached --others --exclude-standard | xargs -0 cat 2>/dev/null | wc -c)
        git check-ignore -q "$build" ||
            echo "$build is not ignored by git: name a folder below build/, or add it to .git/info/exclude"
    fi
    mib() { awk -v bytes="$1" 'BEGIN { printf "%.1f MiB", bytes / 1048576 }'; }
    for program in $(with_libraries $tests $small $others); do
        [ -x "$build/$program" ] && printf '%-24s %10s\n' "$program" "$(mib "$(wc -c <"$build/$program")")"
    done
    echo "prepared for $GPU_ARCH in $(($(date +%s) - started)) s"
    sum=$((kit_bytes + tree_bytes))
    echo "carry $build: $(mib "$kit_bytes")"
    echo "with the working tree, $(mib "$tree_bytes"), it is $(mib $sum) of ${KIT_MIB:-64} MiB"
    if [ $sum -gt $((${KIT_MIB:-64} * 1048576)) ]; then
        echo "too large to carry: remove programs from $build; the GPU machine builds what is missing" >&2
        exit 1
    fi
    exit ${failed:-0}
    ;;
esac

# --- rows ---
# The list of rows is read twice: first to learn which rows there are and which programs they need, then to
# run them.

out=${out:-build/gpu/results}
mkdir -p "$out" || exit 1
summary=$out/summary.txt results=$out/results.jsonl logs=$out/log.txt running=$out/running.log
failed=0 rows=0 done_rows=0 needed= pass=plan tool=
: >"$temporary/plan"
: >"$temporary/done"
: >"$results"
: >"$logs"

# write_summary NOW: one page with every row; NOW: the current activity. A reader sees the old page or the new
# one, never a part.
write_summary() {
    {
        echo "$(date -u '+%Y-%m-%d %H:%M:%S') UTC, $mode: $1"
        cat "$temporary/device" 2>/dev/null
        echo
        cat "$temporary/done"
        tail -n "+$((done_rows + 1))" "$temporary/plan"
    } >"$summary.new" && mv -f "$summary.new" "$summary"
}

is_wanted() { [ -z "$only" ] || printf '%s: %s\n' "$name" "$title" | grep -Eq -- "$only"; }

# row NAME LIMIT TITLE COMMAND...
row() {
    name=$1 limit=${ROW_SECONDS:-$2} title=$3
    shift 3
    [ "$name" = device ] || is_wanted || return 0
    if [ $pass = plan ]; then
        rows=$((rows + 1))
        printf '%-22s %-14s %5s    %s\n' "$name" - - "$title" >>"$temporary/plan"
        for word in "$@"; do
            case $word in "$build"/*) needed="$needed ${word#"$build"/}" ;; esac
        done
        return 0
    fi
    run_row "$@"
}

# skip NAME TITLE REASON: a row that cannot run here, which is no failure.
skip() {
    name=$1 title=$2
    is_wanted || return 0
    if [ $pass = plan ]; then
        rows=$((rows + 1))
        printf '%-22s %-14s %5s    %s\n' "$name" - - "$title" >>"$temporary/plan"
    else
        if [ "$mode" = shared ]; then record "NOT RUN" 0 "$3"; else record "skipped" 0 "$3"; fi
    fi
}

# record RESULT SECONDS [REASON]: a line on the console and in each file.
record() {
    done_rows=$((done_rows + 1))
    printf '%-22s %-14s %3d s    %s%s\n' "$name" "$1" "$2" "$title" "${3:+: $3}" | tee -a "$temporary/done"
    printf '{"row": "%s", "title": "%s", ' "$name" "$title" >>"$results"
    printf '"result": "%s", "seconds": %d}\n' "$1" "$2" >>"$results"
    case $1 in
    ok | skipped) ;;
    *) failed=1 ;;
    esac
}

# print_end FILE: its last lines, printable characters only.
print_end() { LC_ALL=C tail -n 3 "$1" | LC_ALL=C tr -cd '\11\12\40-\176' | cut -c 1-160 | sed 's/^/    /'; }

run_row() {
    left=$((started + seconds - $(date +%s)))
    kept=$(((rows - done_rows - 1) * ${KEPT_SECONDS:-8}))
    allowed=$((left - kept))
    # A late row has its reserved time.
    [ $allowed -ge "${KEPT_SECONDS:-8}" ] || allowed=${KEPT_SECONDS:-8}
    [ $allowed -le $left ] || allowed=$left
    [ $allowed -le "$limit" ] || allowed=$limit
    if [ $allowed -le 0 ]; then
        record "NOT RUN" 0 "no time was left"
        return 0
    fi
    if [ -n "$tool" ]; then
        # The library checks every call, and some tests make calls fail on purpose.
        [ "$tool" != memcheck ] || set -- --report-api-errors no "$@"
        set -- env DDP_TEST_SANITIZED=1 compute-sanitizer --tool "$tool" --error-exitcode 2 "$@"
    fi
    write_summary "running $name, row $((done_rows + 1)) of $rows"
    begin=$(date +%s)
    rm -f "$temporary/status"
    # In the background, and watched: a program that waits for a stuck driver cannot be killed, and the next
    # row must not wait for it.
    (
        timeout -k 2 "$allowed" "$@" >"$running" 2>&1 </dev/null &
        echo $! >"$temporary/pid"
        wait $!
        echo $? >"$temporary/status.new"
        mv "$temporary/status.new" "$temporary/status"
    ) >/dev/null 2>&1 &
    pause=0.02
    until [ -f "$temporary/status" ] || [ $(($(date +%s) - begin)) -gt $((allowed + 5)) ]; do
        sleep $pause
        [ "$(date +%s)" = "$begin" ] || pause=0.2
    done
    status=$(cat "$temporary/status" 2>/dev/null || echo stuck)
    took=$(($(date +%s) - begin))
    case $status in
    0) result=ok ;;
    77) result="FAILED (77)" ;;
    124 | 137) if [ $took -ge $allowed ]; then result="HUNG, $status"; else result="FAILED ($status)"; fi ;;
    126 | 127) result="NOT BUILT" ;;
    stuck) result="STUCK" ;;
    *) result="FAILED ($status)" ;;
    esac
    { printf '=== %s: %s: %s\n' "$name" "$title" "$result"; tail -c 400000 "$running"; } >>"$logs"
    [ "$name" != device ] || cp "$running" "$temporary/device"
    record "$result" $took
    [ "$result" = ok ] || print_end "$running" | tee -a "$temporary/done"
    # Tests that a program left out: it runs on a real GPU, or with another engine.
    [ "$result" != ok ] || sed -n 's/^not run: /    &/p' "$running" | sort -u | tee -a "$temporary/done"
    rm -f "$running"
    if [ "$name $status" = "device 77" ]; then
        write_summary "there is no device"
        exit 77
    fi
    write_summary "$done_rows of $rows rows are done"
}

# The same as row, for programs that need NCCL, or cuBLASLt.
nccl_row() { if [ -n "$nccl" ]; then row "$@"; else skip "$1" "$3" "built without NCCL"; fi; }
gpt_row() { if [ -n "$cublaslt" ]; then row "$@"; else skip "$1" "$3" "cuBLASLt is missing"; fi; }

# One rank, no staging.
nccl_rows() {
    set -- env DDP_TEST_ENGINE=nccl
    nccl_row nccl.collectives 60 "NCCL, tree order, 1 rank: collectives" \
        "$@" "$build/test_conformance" threads 1
    nccl_row nccl.training 60 "NCCL, tree order, 1 rank: training has the bits of the CPU" \
        "$@" "$build/test_training" threads 1
    nccl_row nccl.fsdp 60 "NCCL, 1 rank: sharded training" "$@" "$build/test_fsdp" threads 1
    nccl_row nccl.layers 60 "NCCL, 1 rank: tensor-parallel layers" "$@" "$build/test_layers" threads 1
}
# From NCCL 2.30 on, several ranks of a communicator may use one GPU. Ranks that are threads must not free memory
# while another rank is in a call: cudaFree waits for the whole GPU. Tests that do are run as processes.
nccl_shared_rows() {
    set -- env NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_ALGO=Ring NCCL_MAX_CTAS=8 DDP_TEST_ENGINE=nccl
    shared_row nccl2.groups "threads, 2 and 3 ranks: messages, splits, windows, aborts, timeouts" \
        "$@" "$build/test_groups" threads 2 3
    shared_row nccl2.collectives "threads, 2 ranks: collectives, all-to-all" \
        "$@" "$build/test_conformance" threads 2
    shared_row nccl2.tensor "threads, 2 ranks: tensors have the bits of the CPU" \
        "$@" "$build/test_tensor" threads 2
    shared_row nccl2.pipeline "threads, 2 ranks: pipelines have the bits of the CPU" \
        "$@" "$build/test_pipeline" threads 2
    shared_row nccl2.training "processes, 2 and 4 ranks: training has the bits of the CPU" \
        "$@" "$build/test_training" processes 2 4
    shared_row nccl2.processes "processes, 2 ranks: messages, splits, windows, aborts, timeouts" \
        "$@" "$build/test_groups" processes 2
}
# shared_row NAME TITLE COMMAND...
shared_row() {
    name=$1 title="NCCL on one GPU, $2"
    shift 2
    if [ $pass = run ] && [ -n "$nccl" ] && [ "$nccl_version" -lt 23000 ]; then
        skip "$name" "$title" "NCCL is older than 2.30; slim_nccl.sh builds a newer one"
    else
        nccl_row "$name" 60 "$title" "$@"
    fi
}
# Ranks that share the GPU, staged through host memory. In a program that starts processes, 1 rank comes last:
# it starts CUDA in the program itself, which cannot fork afterwards.
thread_rows() {
    row collectives.threads 90 "staged, threads, 1 to 4 ranks: collectives" \
        "$build/test_conformance" threads 1 2 3 4
    row training.threads 60 "staged, threads, 1, 2, 4 ranks: training has the same bits" \
        "$build/test_training" threads 1 2 4
    row fsdp.threads 90 "staged, threads, 2 to 4 ranks: sharded training, checkpoints" \
        "$build/test_fsdp" threads 2 3 4
    row groups.threads 90 "staged, threads, 1 to 4 ranks: messages, splits, failures, leaks" \
        "$build/test_groups" threads 1 2 3 4
    row tensor.threads 60 "staged, threads, 1 to 4 ranks: tensors have the bits of the CPU" \
        "$build/test_tensor" threads 1 2 3 4
    row pipeline.threads 60 "staged, threads, 1 to 4 ranks: pipelines have the bits of the CPU" \
        "$build/test_pipeline" threads 1 2 3 4
    row layers.threads 60 "staged, threads, 1 to 4 ranks: layers against the CPU" \
        "$build/test_layers" threads 1 2 3 4
}
process_rows() {
    row collectives.processes 90 "staged, processes, 1 to 4 ranks: collectives" \
        "$build/test_conformance" processes 2 3 4 1
    row training.processes 60 "staged, processes, 1, 2, 4 ranks: training has the same bits" \
        "$build/test_training" processes 2 4 1
    row fsdp.processes 90 "staged, processes, 2 to 4 ranks: sharded training" \
        "$build/test_fsdp" processes 2 3 4
    row groups.processes 90 "staged, processes, 1 to 4 ranks: messages, splits, failures, leaks" \
        "$build/test_groups" processes 2 3 4 1
    row tensor.processes 60 "staged, processes, 1 to 4 ranks: tensors have the bits of the CPU" \
        "$build/test_tensor" processes 2 3 4 1
    row pipeline.processes 60 "staged, processes, 2 to 4 ranks: pipelines have the bits of the CPU" \
        "$build/test_pipeline" processes 2 3 4
    row layers.processes 60 "staged, processes, 2 and 3 ranks: layers against the CPU" \
        "$build/test_layers" processes 2 3
}
run_rows() {
    row kernels 60 "kernels against references" "$build/test_kernels"
    row attention 60 "attention against the CPU" "$build/test_attention"
    nccl_rows
    gpt_row mlp 60 "examples/train_mlp_cuda, 1 and 2 ranks: learns, same bits" \
        sh tests/gpu/test_mlp.sh "$build/train_mlp_cuda"
    row fsdp.one 60 "1 rank: sharded training, checkpoints" "$build/test_fsdp" threads 1
    gpt_row gpt.one 60 "GPT, 1 rank, against the CPU" "$build/test_gpt" threads 1 1
    gpt_row trainer.one 120 "the GPT trainer, 1 rank: losses, same bits again, offload" \
        sh tests/gpu/test_trainer.sh "$build/train_gpt_cuda" "$build/train_gpt" one
    thread_rows
    gpt_row gpt.two 60 "staged, threads, 2 ranks: GPT with --tp, against the CPU" "$build/test_gpt" threads 2
    gpt_row trainer.many 150 "the GPT trainer, 2 and 4 ranks: strategies, stages, --tp" \
        sh tests/gpu/test_trainer.sh "$build/train_gpt_cuda" "$build/train_gpt" many
    process_rows
    nccl_shared_rows
    for tool in memcheck racecheck; do
        if [ "$sanitizer" = "with compute-sanitizer" ]; then
            row "$tool.kernels" 90 "kernels under compute-sanitizer, $tool" "$build/test_kernels_small"
        else
            skip "$tool.kernels" "kernels under compute-sanitizer, $tool" "compute-sanitizer is missing"
        fi
    done
    tool=
}
sanitize_rows() {
    for tool in memcheck racecheck; do
        row "$tool.kernels" 120 "kernels against references" "$build/test_kernels_small"
        row "$tool.attention" 120 "attention against the CPU" "$build/test_attention"
        gpt_row "$tool.gpt" 150 "GPT, 1 and 2 ranks, against the CPU" "$build/test_gpt" threads 1 2
    done
    tool=memcheck
    row memcheck.collectives 90 "collectives, 1 to 3 ranks" "$build/test_conformance_small" threads 1 2 3
    row memcheck.groups 90 "messages, splits, failures, 1 to 3 ranks" "$build/test_groups" threads 1 2 3
    nccl_row memcheck.nccl 90 "NCCL, tree order, 1 rank: training" \
        env DDP_TEST_ENGINE=nccl "$build/test_training" threads 1
    for tool in memcheck racecheck; do
        row "$tool.training" 90 "training, 1, 2, 4 ranks" "$build/test_training" threads 1 2 4
        row "$tool.fsdp" 90 "sharded training, 2 ranks" "$build/test_fsdp" threads 2
        row "$tool.layers" 90 "layers, 2 ranks" "$build/test_layers" threads 2
        row "$tool.tensor" 90 "tensors, 3 ranks" "$build/test_tensor" threads 3
        row "$tool.pipeline" 90 "pipelines, 2 ranks" "$build/test_pipeline" threads 2
    done
    tool=synccheck
    row synccheck.kernels 90 "kernels against references" "$build/test_kernels_small"
    row synccheck.attention 90 "attention against the CPU" "$build/test_attention"
    gpt_row synccheck.gpt 120 "GPT, 1 rank, against the CPU" "$build/test_gpt" threads 1
    tool=
}
first_row() { row device 40 "a kernel launches; device, driver, libraries" "$build/test_device"; }
later_rows() {
    case $mode in
    sanitize) sanitize_rows ;;
    shared) nccl_shared_rows ;;
    *) run_rows ;;
    esac
}

nccl=1 cublaslt=1 nccl_version=0
first_row
later_rows
if [ $rows -le 1 ] && [ -n "$only" ] && ! printf 'device: a kernel launches' | grep -Eq -- "$only"; then
    echo "no row matches '$only'"
    exit 1
fi
finish() {
    cat "$summary"
    bad=$(grep -vcE '"result": "(ok|skipped)"' "$results")
    echo "$(grep -c '^{' "$results") of $rows rows have run, $bad of them are not ok"
    echo "$(($(date +%s) - started)) s, $sanitizer"
}
stop() {
    kill "$(cat "$temporary/pid" 2>/dev/null)" 2>/dev/null
    write_summary "stopped"
    finish
    exit 143
}
trap stop TERM INT
write_summary "building"
build_missing $(printf '%s\n' $needed | sort -u) >"$running" 2>&1 || failed=1
tee -a "$logs" <"$running"
echo "programs are ready after $(($(date +%s) - started)) s"
[ ! -f "$build/test_conformance.built" ] || was_built_with "$build" test_conformance nccl || nccl=
[ "${GPU_CUBLASLT-unknown}" ] || cublaslt=
pass=run
first_row
nccl_version=$(sed -n 's/^NCCL: version \([0-9]*\).*/\1/p' "$temporary/device" 2>/dev/null | grep . || echo 0)
later_rows
again=$(sed -n 's/^{"row": "\([^"]*\)".*"result": "[A-Z].*/\1/p' "$results" | tr '\n' '|')
again=$(echo "$again" | sed 's/|$//; s/\./\\./g')
write_summary "all rows are done${again:+; to run those again that are not ok: --only '^($again):'}"
finish
exit $failed

#!/bin/sh
# Builds a slim NCCL, for tests of several ranks on one GPU. It needs neither a GPU nor a network.
#   slim_nccl.sh SOURCE_DIR OUT_DIR   SOURCE_DIR: sources of NCCL 2.30 or newer, such as
#                                     git clone -b v2.30.7-1 https://github.com/NVIDIA/nccl SOURCE_DIR
#                                     OUT_DIR: gets libnccl.so.2; run.sh finds it in build/gpu/nccl
#   slim_nccl.sh check LIBRARY        only checks a library that was built before
# The library has one architecture, and only the device functions of the tests: messages, copies between ranks,
# the barrier, sums and averages of f32 and bf16; rings only, so it needs NCCL_ALGO=Ring. It must be at most
# $NCCL_MIB large, at least version 2.30, and have every function that ddp_cuda.cuh calls.
# Objects are in OUT_DIR/objects until the library is complete: a build that was stopped continues.
#   $ARCH          sm_90 by default
#   $NVCC, $CXX    the compilers; $CC compiles the check; $JOBS of them at a time, 1 by default
#   $NCCL_MIB      40 by default
# Status: 0 the library is complete, 1 not.
set -u
here=$(cd "$(dirname "$0")" && pwd)
fail() {
    echo "slim_nccl.sh: $*" >&2
    exit 1
}
usage() {
    sed -n '/^set -u/q; 2,$s/^# \{0,1\}//p' "$here/slim_nccl.sh" >&2
    exit 1
}
[ $# -eq 2 ] || usage

# check LIBRARY: size, version and functions.
check() {
    library=$(realpath "$1") && [ -f "$library" ] || fail "$1 is missing; build it first"
    mib=$((($(wc -c <"$library") + 1048575) / 1048576)) limit=${NCCL_MIB:-40}
    [ $mib -le "$limit" ] || fail "$library has $mib MiB, more than $limit; set ARCH to one architecture"
    temporary=$(mktemp -d) || exit 1
    trap 'rm -rf "$temporary"' EXIT
    nm -D --defined-only "$library" | sed 's/.* //; s/@.*//' | sort -u >"$temporary/has"
    grep -o '\bnccl[A-Z][A-Za-z]*(' "$here/../../ddp_cuda.cuh" | tr -d '(' | sort -u >"$temporary/needs"
    [ -s "$temporary/needs" ] || fail "ddp_cuda.cuh calls no function of NCCL"
    lacking=$(comm -13 "$temporary/has" "$temporary/needs" | tr '\n' ' ')
    [ -z "$lacking" ] || fail "$library lacks functions of NCCL that ddp_cuda.cuh calls: $lacking"
    cat >"$temporary/version.c" <<'END'
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv) {
    void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
    int version = 0, (*get)(int *) = library ? (int (*)(int *))dlsym(library, "ncclGetVersion") : NULL;
    if (!get || get(&version)) fprintf(stderr, "%s\n", library ? "ncclGetVersion failed" : dlerror());
    return printf("%d\n", version) < 0;
}
END
    "${CC:-cc}" -w "$temporary/version.c" -o "$temporary/version" -ldl || fail "${CC:-cc} cannot compile the check"
    version=$("$temporary/version" "$library" 2>"$temporary/error") || version=0
    [ "$version" != 0 ] || fail "$library cannot be loaded: $(cat "$temporary/error")"
    [ "$version" -ge 23000 ] || fail "$library has version $version; ranks share a GPU from 23000 (2.30) on"
    echo "$library: version $version, $mib MiB, $(wc -l <"$temporary/needs") functions"
}
if [ "$1" = check ]; then
    check "$2"
    exit
fi

source=$1 out=$2 arch=${ARCH:-sm_90}
nvcc=$(command -v "${NVCC:-nvcc}") || fail "nvcc is missing: put the CUDA toolkit's bin in PATH, or set NVCC"
for tool in make python3 strip nm; do
    command -v $tool >/dev/null || fail "$tool is missing; install it"
done
[ -f "$source/makefiles/version.mk" ] && [ -f "$source/src/device/generate.py" ] ||
    fail "$source does not hold the sources of NCCL: a clone of NVIDIA/nccl has makefiles/version.mk"
number() { sed -n "s/^NCCL_$1[ :=]*\([0-9][0-9]*\).*/\1/p" "$source/makefiles/version.mk"; }
[ "$(number MAJOR)" -gt 2 ] || [ "$(number MINOR)" -ge 30 ] ||
    fail "$source has version $(number MAJOR).$(number MINOR); ranks share a GPU from 2.30 on"
mkdir -p "$out/objects" || exit 1
out=$(realpath "$out")
started=$(date +%s)

# The names of src/device/generate.py. Over one rank no device function runs. In tree order, sums use messages.
functions="SendRecv|AllGatherV? RING *|Broadcast RING *|AllReduce MinMax u8 RING *|Reduce Sum f32 RING *"
functions="($functions|(AllReduce|ReduceScatter) (Sum|PreMulSum) (f32|bf16) RING *)"
CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(realpath "$nvcc")")")}
export CUDA_HOME
# The headers of CUDA without those of an older NCCL, which would be found before those of the sources.
mkdir -p "$out/objects/cuda" && find "$CUDA_HOME/include/" -maxdepth 1 -mindepth 1 ! -name 'nccl*' \
    -exec ln -sfn -t "$out/objects/cuda" {} + || fail "$CUDA_HOME/include has no headers; set CUDA_HOME"
make -C "$source" -j "${JOBS:-1}" src.lib "BUILDDIR=$out/objects" "NVCC=$nvcc" "ONLY_FUNCS=$functions" \
    "CUDA_INC=$out/objects/cuda" "NVCC_GENCODE=-gencode=arch=compute_${arch#sm_},code=$arch" >"$out/build.log" 2>&1 || {
    tail -n 15 "$out/build.log" >&2
    fail "NCCL does not compile; $out/build.log has all messages"
}
built=$(ls "$out"/objects/lib/libnccl.so.*.*.*) || fail "the build left no library in $out/objects/lib"
strip --strip-unneeded -o "$out/libnccl.so.2" "$built" || fail "strip failed"
check "$out/libnccl.so.2"
rm -rf "$out/objects"
echo "built for $arch in $(($(date +%s) - started)) s"

#!/bin/sh
# All ways to include, compile and link the headers: one case per call.
#   matrix.sh ROOT WORK CASE     the cases are the functions case_... below; `matrix.sh list` prints them
# $CC, $CXX, $CLANG, $CLANGXX, $NVCC, $ARM64_CC, $ARM64_CXX: the compilers; $QEMU_ARM64 runs programs for arm64.
# $NCCL_INCLUDE: the folder of nccl.h; $MPI_FLAGS find mpi.h. A case that needs an empty one ends with
# status 77 (skipped).
set -u

if [ "${1:-}" = list ]; then
    sed -n 's/^case_\([a-z0-9_]*\)().*/\1/p' "$0"
    exit 0
fi
root=$1 work=$2/$3 case=$3
CC=${CC-gcc} CXX=${CXX-g++} CLANG=${CLANG-clang} CLANGXX=${CLANGXX-clang++} NVCC=${NVCC-} MPI_FLAGS=${MPI_FLAGS-}
warnings='-Wall -Wextra -pedantic -Werror'
strict='-Wshadow -Wconversion -Wsign-conversion' # not used by this project, but by projects that copy the headers
# for cases that need only declarations
declared='-DDDP_IMPLEMENTATION_INCLUDED -DDDP_FSDP_IMPLEMENTATION_INCLUDED -DDDP_PIPELINE_IMPLEMENTATION_INCLUDED -DDDP_TENSOR_IMPLEMENTATION_INCLUDED'
rm -rf "$work"
mkdir -p "$work"
cd "$work" || exit 1

headers=
siblings=
for header in ddp.h ddp_fsdp.h ddp_pipeline.h ddp_tensor.h; do
    if [ -f "$root/$header" ]; then headers="$headers $header"; fi
done
for header in $headers; do
    if [ "$header" != ddp.h ]; then siblings="$siblings $header"; fi
done

fail() { echo "$case: $*"; exit 1; }
need() { if [ -z "$1" ]; then echo "$case: skipped, no $2"; exit 77; fi; }
build() { echo "+ $*"; "$@" || fail "failed: $*"; }   # must succeed
refuse() { # must fail; its messages go to refused.log
    echo "+ $* (must fail)"
    if "$@" >refused.log 2>&1; then fail "was accepted, and must not be: $*"; fi
}

# Source files. Each include line is for every header that exists, or those given.
include() { for h in ${1:-$headers}; do echo "#include \"$h\""; done; }
implementation() { # [extra line]
    printf '%s\n' "${1:-}" '#define DDP_IMPLEMENTATION'
    include
}
main_program() { # uses the library from outside of the implementation
    include
    cat <<'END'
#include <stdio.h>
#include <string.h>
#ifdef __cplusplus
extern "C"
#endif
int ddp_test_other(void);
int main(void) {
    if (strcmp(ddp_result_name(DDP_OK), "DDP_OK") != 0 || ddp_last_error() == 0) return 1;
    return ddp_test_other();
}
END
}
other_unit() { # a second file that includes the headers
    include
    echo '#ifdef __cplusplus'
    echo 'extern "C"'
    echo '#endif'
    echo 'int ddp_test_other(void);'
    echo 'int ddp_test_other(void) { return ddp_result_name(DDP_ERR_INVALID)[0] != (char)68; }'
}
# libc headers come first, without _GNU_SOURCE: the headers of ddp then cannot enable features any more.
libc_first='#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>'

#== declarations alone =======================================================================================

case_declarations() { # strict ISO C and C++, each header first in its file, twice
    for h in $headers; do
        { include "$h"; include "$h"; echo 'typedef int ddp_test_not_empty;'; } >unit.c
        for compiler in $CC $CLANG; do
            build $compiler -std=c11 $warnings -I"$root" -fsyntax-only unit.c
            build $compiler -std=gnu2x $warnings -I"$root" -fsyntax-only unit.c
        done
        for compiler in $CXX $CLANGXX; do
            build $compiler -x c++ -std=c++17 $warnings -I"$root" -fsyntax-only unit.c
            build $compiler -x c++ -std=c++20 $warnings -I"$root" -fsyntax-only unit.c
        done
    done
}

#== the implementation, by compiler and language =============================================================

implement() { # command...; the flavours of the tests have gcc, g++ and clang at -O2, the trainers gcc at -O3 -march=native, case_linking gcc and g++ without
    implementation >unit.c
    build "$@" $warnings $strict -I"$root" -c unit.c -o unit.o
}
case_c11_clang() { need "$CLANG" clang; implement $CLANG -std=gnu11 -O0; }
case_native_clangxx() { need "$CLANGXX" clang++; implement $CLANGXX -x c++ -std=c++17 -O0 -march=native; }
case_extras() { # headers to copy: each by itself in a file, as C and C++, and all in one CUDA file
    cp "$root"/examples/extras/*.h "$root/examples/gpt/gpt.h" .
    : >all.c
    for header in "$root"/examples/extras/*.h; do
        name=$(basename "$header")
        echo "#include \"examples/extras/$name\"" | tee unit.c >>all.c
        for compiler in "$CC -std=gnu11" "${CXX:+$CXX -x c++ -std=c++17}" "${CLANG:+$CLANG -std=gnu11}" "${CLANGXX:+$CLANGXX -x c++ -std=c++17}"; do
            [ -z "$compiler" ] || build $compiler $declared $warnings $strict -fsyntax-only -I"$root" unit.c
        done
        # next to ddp.h in another tree, after it; llmc.h also needs gpt.h
        { include ddp_tensor.h; echo '#include "gpt.h"'; echo "#include \"$name\""; } >copied.c
        build $CC -std=gnu11 $declared $warnings $strict -fsyntax-only -I"$root" -I. copied.c
    done
    [ -z "$NVCC" ] || cuda -arch=compute_80 -x cu $declared -c all.c -o all.o
}
case_cxx20_gcc() { need "$CXX" g++; implementation >unit.c; build $CXX -x c++ -std=c++20 $warnings $strict -fsyntax-only -I"$root" unit.c; }
case_gnu_source_gcc() { implementation '#define _GNU_SOURCE' >unit.c; build $CC -std=gnu11 $warnings $strict -fsyntax-only -I"$root" unit.c; }

case_optimizer_bits() { # the arithmetic of optimizers is the same however it is compiled
    need "$CLANG" clang
    for command in "$CC -O2" "$CC -O3 -march=native -ffp-contract=fast" "$CLANG -O3 -march=native -ffp-contract=fast"; do
        build $command -std=gnu11 $warnings -I"$root" -I"$root/examples/gpt" "$root/tests/compile/optimizer_bits.c" -o bits -lm
        ./bits >bits.txt || fail "$command: $(cat bits.txt)"
        cat bits.txt >>all.txt
    done
    [ "$(sort -u all.txt | wc -l)" -eq 1 ] || fail "other bits by compiler or options: $(tr '\n' ' ' <all.txt)"
}

case_contract() { # names, types and values that programs were promised; the definitions are those of C, other cases have the bodies in C++ and CUDA
    build $CC -std=gnu11 $warnings -I"$root" "$root/tests/compile/contract.c" -o contract -lpthread -lm
    build ./contract
    for compiler in "${MPI_FLAGS:+$CC -std=gnu11 -DDDP_USE_MPI $MPI_FLAGS}" "${CXX:+$CXX -x c++ -std=c++17}" "${CLANG:+$CLANG -std=gnu11}" "${CLANGXX:+$CLANGXX -x c++ -std=c++17}"; do
        [ -z "$compiler" ] || build $compiler $declared $warnings -fsyntax-only -I"$root" "$root/tests/compile/contract.c"
    done
    # A type that is not the promised one is refused, so that this case can fail.
    sed 's/FUNCTION(ddp_sampler_length, int64_t/FUNCTION(ddp_sampler_length, int32_t/' "$root/tests/compile/contract.c" >other.c
    refuse $CC -std=gnu11 $declared -Werror -I"$root" -fsyntax-only other.c
    [ -z "$NVCC" ] || cuda -arch=compute_80 -x cu $declared -DDDP_CUDA_IMPLEMENTATION_INCLUDED -c "$root/tests/compile/contract.c" -o contract.o
}

case_mpi() { # with the MPI backend, in C and C++, by every compiler
    need "$MPI_FLAGS" mpi.h
    implementation >unit.c
    for compiler in "$CC -std=gnu11" "${CLANG:+$CLANG -std=gnu11}" "${CXX:+$CXX -x c++ -std=c++17}" "${CLANGXX:+$CLANGXX -x c++ -std=c++17}"; do
        if [ -n "$compiler" ]; then build $compiler $warnings -fsyntax-only -DDDP_USE_MPI $MPI_FLAGS -I"$root" unit.c; fi
    done
}

# For arm64: the basic instruction set, newer extensions, and the programs of arm64.*. Bodies once, examples
# without them.
case_arm64() {
    need "${ARM64_CC-}" "C compiler for arm64"
    need "${ARM64_CXX-}" "C++ compiler for arm64"
    for compiler in "$ARM64_CC" "$ARM64_CXX"; do
        echo __aarch64__ | $compiler -E -P - | grep -q __aarch64__ && fail "$compiler does not compile for arm64"
    done
    implementation '#define DDP_STATIC' >unit.c
    main_program | sed 's/return ddp_test_other();/return 0;/' >>unit.c
    build $ARM64_CC -std=gnu11 -O0 -march=armv8-a $warnings -I"$root" -c unit.c -o unit.o # -c: the assembler checks inline assembly
    build $ARM64_CC -std=gnu11 -march=armv8.2-a+fp16+bf16+crypto $warnings -I"$root" -fsyntax-only unit.c
    for flags in '' '-march=armv8.2-a+fp16+bf16+crypto'; do
        build $ARM64_CXX -x c++ -std=c++17 $flags $warnings -I"$root" -fsyntax-only unit.c
        if [ -n "$CLANG" ]; then build $CLANG --target=aarch64-linux-gnu -std=gnu11 $flags $warnings -I"$root" -fsyntax-only unit.c; fi
    done
    for example in "$root"/examples/*.c "$root"/examples/gpt/*.c; do
        build $ARM64_CC -std=gnu11 $declared $warnings -I"$root" -fsyntax-only "$example"
    done
    for header in gpt/gpt.h gpt/gpt_tensor.h extras/sources.h extras/llmc.h extras/training.h extras/comm_hooks.h; do # trainers are C; these are C++ too
        include "examples/$header" >unit.cc
        build $ARM64_CXX -std=c++17 $declared $warnings -I"$root" -fsyntax-only unit.cc
    done
    if [ -z "${QEMU_ARM64-}" ]; then return 0; fi # the arithmetic of optimizers is the same on both machines
    build $CC -std=gnu11 -O2 -I"$root" -I"$root/examples/gpt" "$root/tests/compile/optimizer_bits.c" -o bits -lm
    build $ARM64_CC -std=gnu11 -O3 -ffp-contract=fast -static -I"$root" -I"$root/examples/gpt" "$root/tests/compile/optimizer_bits.c" -o arm64_bits -lm
    here=$(./bits) || fail "optimizer_bits: $here"
    there=$("$QEMU_ARM64" ./arm64_bits) || fail "optimizer_bits on arm64: $there"
    [ -n "$here" ] && [ "$here" = "$there" ] || fail "optimizers have other bits on arm64: $there, here $here"
}

case_libc_first_gcc() {
    implementation "$libc_first" >unit.c
    build $CC -std=gnu11 $warnings -fsyntax-only -I"$root" unit.c
}
case_libc_first_clang() {
    need "$CLANG" clang
    implementation "$libc_first" >unit.c
    build $CLANG -std=gnu11 $warnings -fsyntax-only -I"$root" unit.c
}

# ddp_cuda.cuh: bodies by nvcc, declarations by every compiler. DDP_NO_NCCL builds without NCCL. nvcc's -O is
# for the host; device code is always optimised as PTX. -Xcicc -O0 saves that time if no case checks the PTX,
# and -Xptxas -O0 if a case checks only the PTX.
cuda() { echo "+ nvcc $*"; "$NVCC" -std=c++17 -DDDP_NO_NCCL -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror -I"$root" "$@" || fail "failed: nvcc $*"; }
need_cuda() { need "$NVCC" nvcc; [ -f "$root/ddp_cuda.cuh" ] || need '' ddp_cuda.cuh; }
cuda_include() { printf '#include <cuda_runtime_api.h>\n' >probe.cu; "$NVCC" -M probe.cu | tr ' \\' '\n\n' | sed -n 's|/cuda_runtime_api.h$||p' | head -n 1; }

case_cuda() { # as PTX, and code for a later generation; then with ddp.h in a C file, this header's bodies for nvcc, and a C program that calls both
    need_cuda
    { echo '#define DDP_CUDA_IMPLEMENTATION'; include ddp_cuda.cuh; } >unit.cu
    cuda -O1 -Xptxas -O0 --keep -gencode arch=compute_80,code=[sm_90,compute_80] -c unit.cu -o unit.o
    set -- *.ptx
    [ $# -eq 1 ] && [ -f "$1" ] || fail "expected the PTX of one architecture, there is $*"
    grep -q 'ld.global.v4' "$1" && grep -q 'st.global.v4' "$1" || fail "no 16-byte accesses in $1"
    # Sums of squares: f32, f64, f16, bf16, each with and without unscaling in the same pass.
    awk '/\.entry/ { name = /ddp__cuda_squares/ ? $0 : ""; kernels += name != "" }
         name != "" && /ld\.global\.v(4|2\.[a-z]64)/ && !(name in seen) { seen[name] = 1; wide++ }
         END { exit !(kernels == 8 && wide == 8) }' "$1" || fail "sums of squares without 16-byte loads in $1"
    # Steps of layers may be: they promise no bits of the CPU.
    if awk '/\.entry/ { layer = /ddp__cuda_layer/ } !layer && /fma\.rn\.f(32|64)/' "$1" | grep .; then fail "multiplications and additions are fused in $1"; fi
    if nm -g --defined-only unit.o | awk '$2 != "V" { print $3 }' | grep -Ev '^ddp_(cuda_|device_cuda$)'; then fail "the symbols above are exported"; fi

    { echo '#define DDP_IMPLEMENTATION'; include ddp.h; } >core.c
    { include ddp_cuda.cuh; echo 'int main(void) { int device; return ddp_cuda_pick(0, 0, &device) != DDP_OK && !ddp_last_error()[0]; }'; } >main.c
    build $CC -std=gnu11 $warnings -I"$root" -c core.c -o core.o
    build $CC -std=c11 $warnings -I"$root" -isystem "$(cuda_include)" -c main.c -o main.o
    cuda core.o main.o unit.o -o program -lpthread -lm
    build ./program
    { printf '%s\n' '#define DDP_CUDA_IMPLEMENTATION'; include ddp_cuda.cuh; } >wrong.c
    refuse $CC -std=gnu11 -I"$root" -isystem "$(cuda_include)" -fsyntax-only wrong.c
    grep -q 'error.*nvcc' refused.log || fail "a C compiler does not say that nvcc is needed: $(cat refused.log)"
}
# The kernels of ddp_cuda.cuh for the other headers, by g++ and without nvcc's kernels: in any order of
# headers, in a separate file, and without one of the headers.
case_cuda_siblings() {
    need_cuda
    need "$CXX" g++
    include_cuda=$(cuda_include)
    mkdir alone fsdp
    cp "$root/ddp.h" "$root/ddp_cuda.cuh" alone
    cp "$root/ddp.h" "$root/ddp_cuda.cuh" "$root/ddp_fsdp.h" fsdp
    siblings_of() { # name, folder of the headers, defines, headers; then whether there are tables of optimizers and of layers, and bodies of both siblings
        { echo '#include "host_only.h"'; printf '#define %s\n' DDP_NO_NCCL $3; for h in $4; do echo "#include \"$h\""; done
            echo 'int program(const ddp_device *device) { return device == ddp_device_cuda(); }'; } >"$1.cu"
        build "$CXX" -std=c++17 -O0 -x c++ -Wall -Wextra -Werror -I"$2" -I"$root/tests/support" -isystem "$include_cuda" -c "$1.cu" -o "$1.o"
        have=
        for name in ddp__cuda_optimizer ddp__cuda_layers ddp_optimizer_create ddp_tp_create; do
            have="$have $(nm -C "$1.o" | sed 's/(.*//' | grep -c " [rRdDtT] .*$name\$" || true)"
        done
        [ "$have" = "$5" ] || fail "$1: optimizers, layers, and bodies of ddp_fsdp.h and ddp_tensor.h are$have, expected$5"
    }
    siblings_of before "$root" DDP_IMPLEMENTATION 'ddp_fsdp.h ddp_tensor.h ddp_cuda.cuh' ' 1 1 1 1'
    siblings_of separate "$root" DDP_CUDA_IMPLEMENTATION 'ddp_cuda.cuh' ' 1 1 0 0'
    siblings_of private "$root" 'DDP_STATIC DDP_IMPLEMENTATION' 'ddp_cuda.cuh ddp_tensor.h ddp_fsdp.h' ' 1 1 1 1'
    siblings_of absent alone DDP_CUDA_IMPLEMENTATION 'ddp_cuda.cuh' ' 0 0 0 0'
    siblings_of one fsdp DDP_IMPLEMENTATION 'ddp_cuda.cuh ddp_fsdp.h' ' 1 0 1 0'
}
# Each side of the conditions on NCCL_VERSION_CODE, with the installed header. Newer names must not be used.
case_cuda_nccl_versions() {
    need_cuda
    need "$CXX" g++
    need "${NCCL_INCLUDE-}" nccl.h
    flags="-std=c++17 -x c++ -Wall -Wextra -Werror -I$root -isystem $(cuda_include)"
    [ "$NCCL_INCLUDE" = /usr/include ] || flags="$flags -isystem $NCCL_INCLUDE"
    printf '#include <nccl.h>\nNCCL_VERSION_CODE\n' >probe.cu
    installed=$($CXX $flags -E -P probe.cu | tail -n 1)
    echo "NCCL $installed"
    for version in 21800 21900 22600 22700 22900 23000; do
        windows='ncclWindow_t ncclCommWindowRegister ncclCommWindowDeregister'
        later="$windows ncclMemAlloc ncclMemFree ncclCommRegister ncclCommDeregister"
        if [ $version -ge 21900 ]; then later=$windows; fi
        if [ $version -ge 22700 ]; then later=; fi
        if [ -z "$later" ] && [ "$installed" -lt 22700 ]; then continue; fi
        { echo '#include "tests/support/host_only.h"'; echo '#include <nccl.h>'; echo "${later:+#pragma GCC poison $later}"
            echo '#define DDP_CUDA_IMPLEMENTATION'; include ddp_cuda.cuh; } >unit.cu
        build $CXX $flags -fsyntax-only -DDDP__NCCL_VERSION=$version unit.cu
    done
    refuse $CXX $flags -fsyntax-only -DDDP__NCCL_VERSION=21700 unit.cu
    grep -q 'error.*2.18 or newer' refused.log || fail "old versions are not refused by their number: $(cat refused.log)"
    { echo '#include <nccl.h>'; cat unit.cu; } >early.cu # by the program, before cuda_bf16.h
    build $CXX $flags -fsyntax-only early.cu
}
# Every program of tests/gpu and bench/gpu; case_cuda_examples has the trainer.
case_cuda_gpu_programs() { need_cuda; build env NVCC="$NVCC" sh "$root/tests/gpu/run.sh" build "$work/programs"; }
# The smallest example by itself. The trainer with all headers in one private file: first the trainer, then
# ddp.h and its headers for nvcc, then the example again, and train_mlp_cuda.cu. PTX of sm_80, assembled for
# sm_90. All run on a GPU, and report a missing one. A product without a group returns an error before a
# device is selected.
case_cuda_examples() {
    need_cuda
    cuda -arch=compute_80 $declared -DDDP_CUDA_IMPLEMENTATION_INCLUDED -c "$root/examples/all_reduce_cuda.cu" -o alone.o
    nccl=-lnccl
    echo '#include <nccl.h>' | "$NVCC" -x cu -E - >/dev/null 2>&1 || nccl=-DDDP_NO_NCCL
    printf '#include <cublasLt.h>\nint main(void) { return cublasLtGetVersion() == 0; }\n' >probe.cu
    "$NVCC" -Wno-deprecated-gpu-targets probe.cu -lcublasLt -o probe >probe.log 2>&1 || { echo "cuBLASLt is not installed: the trainer is left out"; return 0; }
    { printf '%s\n' '#define DDP_STATIC' '#define DDP_USE_CUBLASLT' '#define main trainer_main' '#include "examples/gpt/train_gpt_cuda.cu"' '#undef main'; include
        printf '%s\n' 'namespace example {' '#define main example_main' '#include "examples/all_reduce_cuda.cu"' '#undef main' '}'
        printf '%s\n' 'namespace mlp {' '#define main mlp_main' '#include "examples/train_mlp_cuda.cu"' '#undef main' '}'
        printf '%s\n' 'int main(int argc, char **argv) {' \
            '    ddp_cuda_gemm_desc g = DDP_ZERO; if (ddp_cuda_gemm(NULL, &g, 0) != DDP_ERR_INVALID || !strstr(ddp_last_error(), "has no GPUs")) return 9;' \
            '    if (argc == 3) return mlp::mlp_main(argc, argv);' \
            '    return argc > 2 ? trainer_main(argc, argv) : example::example_main(argc, argv);' '}'; } >unit.cu
    build "$NVCC" -std=c++17 -gencode arch=compute_80,code=sm_90 -Xcicc -O0 -Xptxas -O0 "-DDDP__HD=__host__ __device__ inline" \
        -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror -I"$root" unit.cu -o program -lcublasLt $nccl -lpthread -lm
    status=0
    ./program 2 >out.log 2>&1 || status=$?
    [ $status -ne 9 ] || fail "a product without a group is not refused as it should be"
    if [ $status -eq 0 ]; then grep -q '^2 ranks: the sum of 1 to 2 is 3, in each' out.log || fail "$(cat out.log)"
    else grep -Eq 'rank [01]/2 ddp_cuda_group_create group=world: .*on host .*(there is no device|cudaGetDeviceCount)' out.log || fail "$(cat out.log)"
    fi
    if ./program --gpus 0 >out.log 2>&1; then grep -q '^weights' out.log || fail "$(cat out.log)"
    else grep -Eq 'rank 0/1 ddp_cuda_group_create group=world: .*on host .*(there is no device|cudaGetDeviceCount)' out.log || fail "$(cat out.log)"
    fi
    seq 1 300 >text
    if ./program --layers 1 --steps 2 text >out.log 2>&1; then grep -q '^weights hash' out.log || fail "$(cat out.log)"
    else grep -Eq '^train_gpt_cuda: rank 0/1 ddp_cuda_pick group=world: .*on host .*(there is no device|cudaGetDeviceCount)' out.log || fail "$(cat out.log)"
    fi
}

one_error() { # must fail with one error, that holds $1; then a command
    remedy=$1
    shift
    refuse "$@"
    [ "$(grep -c 'error: ' refused.log)" -eq 1 ] || fail "not one error: $(cat refused.log)"
    grep -q "error.*$remedy" refused.log || fail "the error does not name $remedy: $(cat refused.log)"
}

bodies() { # each way to define bodies, one file each, in unit.*.c
    implementation >unit.all.c
    for h in $siblings; do # of a sibling only, after a plain include
        stem=${h%.h}
        { include; echo "#define $(echo "$stem" | tr '[:lower:]' '[:upper:]')_IMPLEMENTATION"; include "$h"; } >"unit.$stem.c"
    done
}

# The flag is an error in a file with bodies, unless allowed explicitly. It is valid in other files.
case_fast_math() {
    bodies
    { include; echo 'typedef int ddp_test_not_empty;'; } >plain.c
    for compiler in $CC $CLANG; do
        for unit in unit.*.c; do one_error DDP_ALLOW_FAST_MATH $compiler -std=gnu11 -ffast-math -I"$root" -fsyntax-only "$unit"; done
        one_error DDP_ALLOW_FAST_MATH $compiler -std=gnu11 -Ofast -I"$root" -c unit.all.c -o unit.o
        build $compiler -std=gnu11 -ffast-math -DDDP_ALLOW_FAST_MATH $warnings -I"$root" -fsyntax-only unit.all.c
        build $compiler -std=gnu11 -Ofast $warnings -I"$root" -fsyntax-only plain.c
    done
    for compiler in $CXX $CLANGXX; do
        one_error DDP_ALLOW_FAST_MATH $compiler -x c++ -std=c++17 -Ofast -I"$root" -fsyntax-only unit.all.c
        build $compiler -x c++ -std=c++17 -Ofast $warnings -I"$root" -fsyntax-only plain.c
    done
}

# -std=c11 hides declarations of libc: one sentence instead of dozens of errors. It is accepted where the
# program shows them.
case_strict_c11() {
    bodies
    for compiler in $CC $CLANG; do
        for unit in unit.*.c; do
            one_error '-std=gnu11' $compiler -std=c11 -I"$root" -fsyntax-only "$unit"
            one_error '-std=gnu11' $compiler -std=gnu11 -D_POSIX_C_SOURCE=200809L -I"$root" -fsyntax-only "$unit"
        done
        build $compiler -std=c11 -D_DEFAULT_SOURCE $warnings -I"$root" -fsyntax-only unit.all.c
        build $compiler -std=c11 -D_GNU_SOURCE $warnings -I"$root" -fsyntax-only unit.all.c
    done
    { printf '%s\n' '#include <stdio.h>' '#define _DEFAULT_SOURCE' '#define DDP_IMPLEMENTATION'; include; } >late.c # too late: libc has been read
    one_error '-std=gnu11' $CC -std=c11 -I"$root" -fsyntax-only late.c
}

#== linking ==================================================================================================

case_linking() { # one implementation and its users: by gcc in C and by g++ in C++, from files of either language
    need "$CXX" g++
    implementation >a.c; main_program >b.c; other_unit >c.c
    build $CC -std=gnu11 $warnings -I"$root" -c a.c -o a.o
    build $CXX -x c++ -std=c++17 $warnings -I"$root" -c a.c -o a.cxx.o
    for unit in b c; do
        build $CC -std=gnu11 $warnings -I"$root" -c $unit.c -o $unit.o
        build $CXX -x c++ -std=c++17 $warnings -I"$root" -c $unit.c -o $unit.cxx.o
    done
    build $CC a.o b.o c.o -o program -lpthread -lm
    build ./program
    build $CXX a.o b.cxx.o c.o -o program -lpthread -lm
    build ./program
    build $CXX a.cxx.o b.o c.cxx.o -o program -lpthread -lm
    build ./program
    refuse $CXX a.o a.cxx.o b.o c.o -o program -lpthread -lm # two implementations
    grep -q 'multiple definition' refused.log || fail "not for a duplicate symbol: $(cat refused.log)"
    for object in a.o a.cxx.o; do # exported symbols are public: ddp_ and never ddp__
        if nm -g --defined-only $object | awk '$2 != "V" && $2 != "W" { print $3 }' | grep -Ev '^ddp_[a-z]'; then fail "$object exports the symbols above"; fi
    done
    # The library must never end the program or print. The compiler also sees macros, which a text search
    # cannot.
    if nm -u a.o | grep -E ' (abort|exit|__assert_fail|printf|puts|putchar|perror|stdout|stderr)(@.*)?$'; then
        fail "the symbols above are used"
    fi
    siblings_alone
}

siblings_alone() { # each sibling implemented in a file of its own, next to ddp.h in another
    [ -n "$siblings" ] || return 0
    { echo '#define DDP_IMPLEMENTATION'; include ddp.h; } >core.c
    build $CC -std=gnu11 $warnings -I"$root" -c core.c -o core.o
    objects=core.o
    for h in $siblings; do
        stem=${h%.h}
        macro=$(echo "$stem" | tr '[:lower:]' '[:upper:]')_IMPLEMENTATION
        { echo "#define $macro"; include "$h"; } >"$stem.c"
        build $CC -std=gnu11 $warnings -I"$root" -c "$stem.c" -o "$stem.o"
        objects="$objects $stem.o"
    done
    build $CC b.o c.o $objects -o program -lpthread -lm
    build ./program
}

case_static() { # a private copy per file, and nothing exported
    implementation '#define DDP_STATIC' >a.c; cp a.c c.c
    main_program >>a.c; other_unit >>c.c
    build $CC -std=gnu11 -O1 $warnings -I"$root" -c a.c -o a.o # -O0 also compiles functions without a caller
    build $CC -std=gnu11 -O1 $warnings -I"$root" -c c.c -o c.o
    build $CC a.o c.o -o program -lpthread -lm
    build ./program
    if nm -g --defined-only c.o | grep -v ' ddp_test_other$' | grep ' '; then fail "DDP_STATIC exports symbols"; fi
    for compiler in $CXX $CLANGXX; do build $compiler -x c++ -std=c++17 $warnings -I"$root" -fsyntax-only a.c; done
}

type "case_$case" >/dev/null 2>&1 || fail "no such case; there are: $(sh "$0" list | tr '\n' ' ')"
"case_$case"

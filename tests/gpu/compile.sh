#!/bin/sh
# Compiles one program for tests/gpu/run.sh and bench/gpu/run.sh: sh tests/gpu/compile.sh FOLDER PROGRAM
# Writes FOLDER/PROGRAM, PROGRAM.sources (the files of this repository that it was made of) and PROGRAM.built
# (their checksum, the architecture, the libraries). If it does not compile, prints the end of what the
# compiler said, and leaves nothing.
#   GPU_ARCH       sm_90, native, ...
#   GPU_NCCL       -lnccl, or empty: built with DDP_NO_NCCL
#   GPU_CUBLASLT   -DDDP_USE_CUBLASLT -lcublasLt, or empty
#   GPU_LEVEL      kit    -O2, optimised machine code with line numbers, no symbols
#                  check  warnings as errors, PTX that is not optimised. Host code is optimised (-O1) only if no
#                         test compiles it so for the fake GPU. $GPU_BODIES is an object with the bodies of
#                         ddp.h and ddp_fsdp.h, $GPU_CUDA_BODIES one with those of ddp_cuda.cuh: they are then
#                         not compiled again
set -u
. tests/gpu/libraries.sh
folder=$1 program=$2
rm -f "$folder/$program" "$folder/$program.sources" "$folder/$program.built"
case $program in
train_gpt | train_gpt_cuda | llmc) source=examples/gpt/$program ;;
train_mlp_cuda) source=examples/$program ;;
bench_*) source=bench/gpu/$program ;;
*) source=tests/gpu/${program%_small} ;;
esac
case $program in
train_gpt | llmc) source=$source.c ;;
*) source=$source.cu ;;
esac

# Sets the positional parameters to the command, without the output.
case $source in
*.c) set -- "${CC:-cc}" -O2 "$source" -lm -lpthread ;; # not -march=native: it may run on another processor
*)
    libraries=${GPU_NCCL:--DDDP_NO_NCCL}
    case $program in
    test_device | test_layers | test_gpt) libraries="$libraries $GPU_CUBLASLT" ;;
    bench_gpt | train_gpt_cuda | train_mlp_cuda) libraries="$libraries -lcublasLt" ;;
    esac
    options="-std=c++17 $(gpu_arch_flags "$GPU_ARCH")"
    case $program in
    *_small) options="$options -DDDP_TEST_SMALL" ;;
    esac
    warnings=-Wall,-Wextra
    case $source in
    tests/*) warnings=$warnings,-ffp-contract=off ;; # references are computed without fused multiply-add
    esac
    if [ "$GPU_LEVEL" = check ]; then
        optimize=-O0
        case $program in # the others are part of support/cuda_tests.cu and support/gpt_tests.cu
        test_device | test_kernels | bench_gpu) optimize=-O1 ;;
        esac
        # Kernels are functions of the host, too: inlining all of them takes half of the compiler's time.
        set -- "$nvcc" $options $optimize -Xcicc -O0 "-DDDP__HD=__host__ __device__ inline"
        set -- "$@" -Werror all-warnings "-Xcompiler=$warnings,-Werror"
        bodies=${GPU_BODIES:-} cuda_bodies=${GPU_CUDA_BODIES:-}
        case $program in # some use private functions
        test_kernels | test_attention) bodies= cuda_bodies= ;;
        test_groups | test_layers | test_training) cuda_bodies= ;;
        esac
        included="-DDDP_IMPLEMENTATION_INCLUDED -DDDP_FSDP_IMPLEMENTATION_INCLUDED"
        [ -z "$bodies" ] || set -- "$@" $included "$bodies"
        [ -z "$cuda_bodies" ] || set -- "$@" -DDDP_CUDA_IMPLEMENTATION_INCLUDED "$cuda_bodies" $GPU_CUBLASLT
    else
        set -- "$nvcc" $options -O2 -lineinfo --compress-mode=size -Xlinker -s "-Xcompiler=$warnings"
    fi
    set -- "$@" "$source" $libraries -lpthread -lm
    ;;
esac
log=$folder/$program.log
seconds=${COMPILE_SECONDS:-1800}
timeout -k 5 "$seconds" "$@" -MMD -MF "$folder/$program.d" -o "$folder/$program" >"$log" 2>&1
status=$?
if [ $status -ne 0 ]; then
    case $status in
    124 | 137) echo "$source: stopped after $seconds s; COMPILE_SECONDS=N gives the compiler more time" ;;
    *) echo "$source does not compile:" ;;
    esac
    tail -n 15 "$log" | cut -c 1-200
    rm -f "$folder/$program" "$folder/$program.d" "$log"
    exit 1
fi
# Paths of this repository are relative; those of CUDA start with a slash.
touch "$folder/$program.d"
{
    echo "$source"
    tr -s ' \\' '\n\n' <"$folder/$program.d" | grep '^[a-z].*\.\(h\|c\|cu\|cuh\)$'
} | sort -u >"$folder/$program.sources"
with=
[ -z "$GPU_NCCL" ] || with=" nccl"
[ -z "$GPU_CUBLASLT" ] || with="$with cublasLt"
echo "$(sum_of "$folder/$program.sources") $GPU_ARCH$with" >"$folder/$program.built"
if [ -s "$log" ]; then
    echo "$source compiles with warnings:"
    tail -n 15 "$log" | cut -c 1-200
fi
rm -f "$folder/$program.d" "$log"

# Functions that tests/gpu/run.sh, tests/gpu/compile.sh and bench/gpu/run.sh share: the architecture to build
# for, NCCL and cuBLASLt, and which programs are up to date. The caller sets $nvcc, the compiler. Functions
# return 0 for yes.

# Prints what to build for: $ARCH if it is set; native if nvidia-smi works; otherwise sm_90.
# nvcc -arch=native without a visible driver builds for sm_75 and reports nothing.
gpu_arch() {
    if [ -n "${ARCH:-}" ]; then
        echo "$ARCH"
    elif timeout 20 nvidia-smi -L >/dev/null 2>&1; then
        echo native
    else
        echo sm_90
    fi
}

# gpu_arch_flags ARCH: the options of nvcc. sm_90 gives machine code without PTX, which keeps programs small.
gpu_arch_flags() {
    case $1 in
    sm_*) echo "-gencode arch=compute_${1#sm_},code=$1" ;;
    *) echo "-arch=$1" ;;
    esac
}

# arch_fits ARCH: programs that were built for ARCH run on the GPU here. Without nvidia-smi they are taken to
# run.
arch_fits() {
    case $1 in
    sm_*) ;;
    *) return 0 ;;
    esac
    if [ -z "${capability:-}" ]; then
        capability=$(timeout 20 nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null)
        capability=$(printf '%s\n' "$capability" | head -n 1 | tr -cd 0-9)
        capability=${capability:-unknown}
    fi
    built=$(printf '%s' "${1#sm_}" | tr -cd 0-9)
    [ "$capability" = unknown ] || { [ "${capability%?}" = "${built%?}" ] && [ "$capability" -ge "$built" ]; }
}

# library_works FOLDER NAME HEADER EXPRESSION: a program with the header and the library compiles, and
# EXPRESSION is 0 in it. With $only_links set, the program need not run.
library_works() {
    printf '#include <%s>\nint main(void) { return %s; }\n' "$3" "$4" >"$1/$2.cu"
    rm -f "$1/$2"
    "$nvcc" -Wno-deprecated-gpu-targets "$1/$2.cu" "-l$2" -o "$1/$2" >"$1/$2.log" 2>&1 || return 1
    [ -n "${only_links:-}" ] || "$1/$2" >>"$1/$2.log" 2>&1
}

# library_of_python NAME [HEADER]: prints the path of NAME (libnccl.so.2), or of NAME.N, in a Python package
# nvidia/*. With HEADER, the package must contain that header too.
library_of_python() {
    timeout 60 "${PYTHON:-python3}" - "$1" "${2:-}" 2>/dev/null <<'END'
import glob, os, sys
for folder in sys.path:
    for path in sorted(glob.glob(os.path.join(folder, "nvidia", "*", "lib", sys.argv[1] + "*"))):
        header = os.path.join(os.path.dirname(path), "..", "include", sys.argv[2])
        if not sys.argv[2] or os.path.exists(header):
            sys.exit(print(path))
END
}

# find_library FOLDER NAME HEADER EXPRESSION: as library_works. If nvcc does not find the library, or the
# program does not find it at run time, PyTorch's is used: NVCC_PREPEND_FLAGS then names it, and FOLDER must
# exist as long as anything is compiled.
find_library() {
    library_works "$@" && return 0
    library=$(library_of_python "lib$2.so" "$3")
    [ -n "$library" ] || return 1
    library_folder=$(dirname "$library")
    flags_before=${NVCC_PREPEND_FLAGS:-}
    mkdir -p "$1/include" "$1/lib" || return 1
    ln -sf "$library" "$1/lib/lib$2.so"
    # Only this library's headers: the package may contain other headers of another CUDA version.
    for header in "$library_folder/../include/${3%%[A-Z.]*}"*.h; do ln -sf "$header" "$1/include/"; done
    export NVCC_PREPEND_FLAGS="$flags_before -I$1/include -L$1/lib -Xlinker -rpath=$library_folder"
    library_works "$@" && echo "using $3 and $library of PyTorch" && return 0
    export NVCC_PREPEND_FLAGS="$flags_before"
    return 1
}

# find_build_libraries FOLDER: sets $GPU_NCCL and $GPU_CUBLASLT, the options that programs are built with;
# empty if the library is missing.
find_build_libraries() {
    GPU_NCCL=-lnccl
    GPU_CUBLASLT="-DDDP_USE_CUBLASLT -lcublasLt"
    if ! find_library "$1" nccl nccl.h '[] { int v; return ncclGetVersion(&v) != ncclSuccess; }()'; then
        echo "NCCL is missing: building with DDP_NO_NCCL"
        GPU_NCCL=
    fi
    if ! find_library "$1" cublasLt cublasLt.h 'cublasLtGetVersion() == 0'; then
        echo "cuBLASLt is missing: layers use the plain kernel, and the GPT programs are left out"
        GPU_CUBLASLT=
    fi
    export GPU_NCCL GPU_CUBLASLT
}

# find_run_libraries PROGRAM...: puts the folders of PyTorch's libraries into LD_LIBRARY_PATH, for those that
# a program lacks at run time.
find_run_libraries() {
    lacking=$(ldd "$@" 2>/dev/null | sed -n 's/^[[:space:]]*\([^ ]*\) => not found$/\1/p' | sort -u)
    for library_name in $lacking; do
        library=$(library_of_python "$library_name")
        [ -n "$library" ] || continue
        LD_LIBRARY_PATH=$(dirname "$library")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        export LD_LIBRARY_PATH
        echo "using $library of PyTorch"
    done
}

# sum_of FILE: a checksum over the contents of the sources that FILE lists.
sum_of() { xargs cat <"$1" 2>/dev/null | cksum | tr ' ' -; }

# is_current FOLDER PROGRAM: FOLDER has the program, built from the sources as they are, for this GPU, and it
# finds its libraries.
is_current() {
    [ -x "$1/$2" ] && [ -f "$1/$2.sources" ] && [ -f "$1/$2.built" ] || return 1
    read -r built_sum built_arch _ <"$1/$2.built"
    [ "$built_sum" = "$(sum_of "$1/$2.sources")" ] || return 1
    arch_fits "$built_arch" && ! ldd "$1/$2" 2>&1 | grep -q 'not found'
}

# was_built_with FOLDER PROGRAM LIBRARY: LIBRARY is nccl or cublasLt.
was_built_with() { grep -qs " $3" "$1/$2.built"; }

# build_programs FOLDER PROGRAM...: compiles them in parallel, up to $JOBS at a time; the number of processors
# by default. $GPU_ARCH, $GPU_NCCL, $GPU_CUBLASLT and $GPU_LEVEL (kit or check) are for compile.sh. Fails if a
# program does not compile.
build_programs() {
    build_folder=$1
    shift
    export nvcc GPU_ARCH GPU_LEVEL
    jobs=${JOBS:-$(nproc 2>/dev/null || echo 2)}
    printf '%s\n' "$@" | xargs -P "$jobs" -n 1 sh tests/gpu/compile.sh "$build_folder"
}

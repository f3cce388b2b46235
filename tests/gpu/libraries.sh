# Sourced by tests/gpu/run.sh and bench/gpu/run.sh: whether programs with NCCL or cuBLASLt link and start here. $nvcc is the compiler.
# Where nvcc does not find a library, or the program does not find it when it starts, the one that PyTorch has brought is taken: $PYTHON's packages nvidia/*.

# library_works FOLDER NAME HEADER EXPRESSION: EXPRESSION is 0 in a program that has HEADER and the library. $only_links: it need not start.
library_works() {
    printf '#include <%s>\nint main(void) { return %s; }\n' "$3" "$4" >"$1/$2.cu"
    rm -f "$1/$2"
    "$nvcc" -Wno-deprecated-gpu-targets "$1/$2.cu" "-l$2" -o "$1/$2" >"$1/$2.log" 2>&1 || return 1
    [ -n "${only_links:-}" ] || "$1/$2" >>"$1/$2.log" 2>&1
}

# The path of lib$1.so, or of lib$1.so.N, that lies beside the header $2 in a package.
library_of_python() {
    "${PYTHON:-python3}" - "$1" "$2" 2>/dev/null <<'END'
import glob, os, sys
for folder in sys.path:
    for path in sorted(glob.glob(os.path.join(folder, "nvidia", "*", "lib", "lib%s.so*" % sys.argv[1]))):
        if os.path.exists(os.path.join(os.path.dirname(path), "..", "include", sys.argv[2])):
            sys.exit(print(path))
END
}

# As library_works; from then on nvcc and what it links find the library. FOLDER stays as long as anything is compiled.
find_library() {
    library_works "$@" && return 0
    library=$(library_of_python "$2" "$3")
    [ -n "$library" ] || return 1
    lies=$(dirname "$library") kept=${NVCC_PREPEND_FLAGS:-}
    mkdir -p "$1/include" "$1/lib" || return 1
    ln -sf "$library" "$1/lib/lib$2.so"
    for header in "$lies/../include/${3%%[A-Z.]*}"*.h; do ln -sf "$header" "$1/include/"; done # no other headers of CUDA's
    export NVCC_PREPEND_FLAGS="$kept -I$1/include -L$1/lib -Xlinker -rpath=$lies"
    library_works "$@" && echo "$3 and $library are PyTorch's" && return 0
    export NVCC_PREPEND_FLAGS="$kept"
    return 1
}

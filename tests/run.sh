#!/bin/sh
# Installs the packages that the tests need, builds and runs all tests. The last lines are ctest's summary.
#   sh tests/run.sh           every test with gcc, clang, as C++, and under the sanitizers
#   sh tests/run.sh --quick   only the plain build, without MPI, CUDA and long tests
# Further arguments go to ctest: sh tests/run.sh --quick -R unit
# Tests that need Python's safetensors and PyTorch run with DDP_TEST_PYTHON=/path/to/venv/bin/python;
# bench/README.md makes one. Packages are installed only when missing, with apt as root or through sudo.
# Everything is built below build/.
set -u
cd "$(dirname "$0")/.." || exit 1

quick=
case ${1:-} in
--quick) quick=1; shift ;;
-h | --help) sed -n '2,7s/^# \{0,1\}//p' tests/run.sh; exit 0 ;;
esac

#== what is missing ==========================================================================================

have() { command -v "$1" >/dev/null 2>&1; }
have_header() { printf '%s\n' '#include <stdarg.h>' '#include <stddef.h>' '#include <stdint.h>' '#include <setjmp.h>' "#include <$1>" |
    gcc -fsyntax-only -x c - 2>/dev/null; }

# The package is for the system's Python, which is not always the first one in PATH.
have_numpy() {
    for python in "${DDP_TEST_PYTHON:-}" python3 /usr/bin/python3; do
        [ -n "$python" ] && "$python" -c 'import numpy' 2>/dev/null && return 0
    done
    return 1
}

missing_packages() { # one line with the packages that this machine lacks
    list=
    have gcc || list="$list gcc"
    have g++ || list="$list g++"
    have_header stdio.h || list="$list libc6-dev"
    have nm || list="$list binutils"
    have patch || list="$list patch"
    have cmake || list="$list cmake"
    have ninja || list="$list ninja-build"
    have python3 || list="$list python3"
    have_numpy || list="$list python3-numpy"
    have pkg-config || list="$list pkg-config"
    have_header cmocka.h || list="$list libcmocka-dev"
    have mpirun || list="$list openmpi-bin"
    have mpicc || list="$list libopenmpi-dev"
    have ip || list="$list iproute2"
    have_header ucp/api/ucp.h || list="$list libucx-dev"
    if [ -z "$quick" ]; then
        have_header cblas.h || list="$list libopenblas-dev" # 12 MB to fetch
        have clang++ || list="$list clang"
        have doxygen || list="$list doxygen" # 6 MB to fetch, 22 MB on the disk; the rest is clang's
        # Other versions format differently; releases without this one skip compile.format.
        have clang-format-14 || ! grep -q '^VERSION_CODENAME=bookworm' /etc/os-release || list="$list clang-format-14"
        case $(uname -m) in
        x86_64) # arm64, compiled across and run by qemu: 70 MB to fetch, 300 MB on the disk
            have aarch64-linux-gnu-g++ || list="$list g++-aarch64-linux-gnu"
            have qemu-aarch64 || have qemu-aarch64-static || list="$list qemu-user" ;;
        esac
    fi
    echo "${list# }"
}

#== install ==================================================================================================

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

# The lists or the lock may be busy for a moment, above all on a machine that has just started.
apt_install() {
    for pause in 3 10 20 30 0; do
        as_root apt-get -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 update -qq
        if as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 \
            install -y -qq --no-install-recommends "$@"; then return 0; fi
        [ "$pause" = 0 ] || { echo "apt-get failed; again in $pause s"; sleep "$pause"; }
    done
    return 1
}

missing=$(missing_packages)
if [ -n "$missing" ]; then
    if ! have apt-get; then
        echo "The tests need these packages (names of Debian), install them and run this again: $missing" >&2
        exit 1
    elif [ "$(id -u)" != 0 ] && ! have sudo; then
        echo "The tests need packages that only root can install, run this as root and then again: apt-get install $missing" >&2
        exit 1
    fi
    echo "Installing $missing"
    # The list is split into words on purpose.
    if ! apt_install $missing; then
        echo "apt-get could not install what the tests need, install it and run this again: $missing" >&2
        exit 1
    fi
    missing=$(missing_packages)
    if [ -n "$missing" ]; then
        echo "The packages are installed, but these are still not found, check PATH: $missing" >&2
        exit 1
    fi
fi

#== configure, build, run ====================================================================================

jobs=$(nproc 2>/dev/null || echo 2)
if [ -n "$quick" ]; then
    build=build/quick flavours=plain long=OFF
else
    build=build/tests flavours='plain;clang;cxx;asan;tsan' long=ON
fi
log=$build/configure.log
mkdir -p "$build"
echo "Configuring and building in $build"
if ! CC=gcc CXX=g++ cmake -G Ninja -S . -B "$build" "-DDDP_TEST_FLAVOURS=$flavours" -DDDP_TEST_LONG=$long "-DDDP_TEST_PYTHON=${DDP_TEST_PYTHON:-}" -DDDP_BUILD_TESTS=ON -DDDP_BUILD_EXAMPLES=OFF >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
fi
cmake --build "$build" -j "$jobs" -- -k 0 || exit 1 # -k 0: every error at once
cd "$build" || exit 1
# Tests of many ranks sleep a good part of their time, and there is always one that does little else.
ctest --output-on-failure --no-tests=error -j "$((2 * jobs + 1))" "$@"
status=$?
if [ -z "${DDP_TEST_PYTHON:-}" ]; then
    echo "Disabled tests were not run. They need doxygen, or Python's safetensors and PyTorch 2.6: bench/README.md shows how to give them a virtual environment."
fi
exit $status

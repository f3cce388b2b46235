#!/bin/sh
# Installs a build tree into a fresh prefix and builds one small consumer in each way that README.md names.
#   install.sh ROOT BUILD WORK       $CC, $CXX, $CMAKE, $PKG_CONFIG name the tools
set -eu
root=$1 build=$2 work=$3
cmake=${CMAKE:-cmake} cc=${CC:-cc} cxx=${CXX:-} pkg_config=${PKG_CONFIG:-}
rm -rf "$work"
mkdir -p "$work/found" "$work/added"
cd "$work"
version=$(sed -n 's/^#define DDP_VERSION_\(MAJOR\|MINOR\|PATCH\) *\([0-9]*\).*/\2/p' "$root/ddp.h" | paste -sd. -)
echo "version $version"

"$cmake" --install "$build" --prefix "$work/first"
mv first prefix # an installed tree can be moved
for header in "$root"/ddp.h "$root"/ddp_*.h "$root"/ddp_*.cuh; do
    [ ! -f "$header" ] || cmp "$header" "prefix/include/${header##*/}"
done

# Without the tools of the tests the headers are installed too. With the tests enabled, configuring names the
# missing tool. CMAKE_IGNORE_PATH hides cmocka.h.
ignored=$(dirname "$(echo '#include <cmocka.h>' | "$cc" -include stdarg.h -include stddef.h -include stdint.h -include setjmp.h -M -x c - |
    tr ' \\' '\n\n' | grep '/cmocka.h$')")
CC=$cc "$cmake" -S "$root" -B "$work/bare" "-DCMAKE_IGNORE_PATH=$ignored" >bare.log 2>&1 || { cat bare.log; exit 1; }
grep 'tests are left out, not found: DDP_CMOCKA_INCLUDE' bare.log
"$cmake" --install "$work/bare" --prefix "$work/bare_prefix" >bare.log
cmp "$root/ddp.h" "$work/bare_prefix/include/ddp.h"
if CC=$cc "$cmake" -S "$root" -B "$work/asked" -DDDP_BUILD_TESTS=ON "-DCMAKE_IGNORE_PATH=$ignored" >asked.log 2>&1; then
    echo "tests were asked for and are left out in silence"
    exit 1
fi
grep 'The tests need cmocka.h' asked.log

cat >consumer.c <<'END'
#define DDP_IMPLEMENTATION
#include <ddp.h>
#include <string.h>
int main(void) { return strcmp(ddp_result_name(DDP_OK), "DDP_OK") != 0; }
END

# find_package, from C and from a project without C.
cat >found/CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.16)
project(consumer LANGUAGES ${CONSUMER_LANGUAGE})
find_package(ddp ${DDP_WANTED} CONFIG REQUIRED)
add_executable(consumer ${CONSUMER_SOURCE})
target_link_libraries(consumer PRIVATE ddp::ddp)
END
{ echo '#define DDP_STATIC'; cat consumer.c; } >consumer.cpp # functions without a caller are not compiled
cp consumer.c found/consumer.c
cp consumer.cpp found/consumer.cpp
configure() { # directory, build directory, then options
    source=$1 binary=$2
    shift 2
    "$cmake" -G Ninja -S "$source" -B "$binary" -DCMAKE_C_COMPILER="$cc" -DCMAKE_PREFIX_PATH="$work/prefix" --no-warn-unused-cli "$@"
}
configure found found/c -DDDP_WANTED="$version" -DCONSUMER_LANGUAGE=C -DCONSUMER_SOURCE=consumer.c
"$cmake" --build found/c
found/c/consumer
if configure found found/none -DDDP_WANTED=99.0 -DCONSUMER_LANGUAGE=C -DCONSUMER_SOURCE=consumer.c >refused.log 2>&1; then
    echo "find_package(ddp 99.0) found version $version"
    exit 1
fi

# add_subdirectory, and FetchContent with a folder as the source: brings no tests, no examples and no language that the
# parent does not have.
cat >added/CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.16)
project(consumer LANGUAGES ${CONSUMER_LANGUAGE})
if(CONSUMER_FETCHES)
    include(FetchContent)
    FetchContent_Declare(ddp SOURCE_DIR "${DDP_ROOT}")
    FetchContent_MakeAvailable(ddp)
else()
    add_subdirectory("${DDP_ROOT}" ddp)
endif()
add_executable(consumer ${CONSUMER_SOURCE})
target_link_libraries(consumer PRIVATE ddp::ddp)
if(TARGET train_gpt OR BUILD_TESTING)
    message(FATAL_ERROR "a subproject builds examples or tests")
endif()
END
cp consumer.c added/consumer.c
cp consumer.cpp added/consumer.cpp
configure added added/c -DDDP_ROOT="$root" -DCONSUMER_LANGUAGE=C -DCONSUMER_SOURCE=consumer.c
"$cmake" --build added/c
added/c/consumer
if [ -n "$cxx" ]; then
    configure found found/cxx -DCMAKE_BUILD_TYPE=Release -DDDP_WANTED="${version%.*}" -DCMAKE_CXX_COMPILER="$cxx" -DCONSUMER_LANGUAGE=CXX -DCONSUMER_SOURCE=consumer.cpp
    configure added added/cxx -DCONSUMER_FETCHES=ON -DCMAKE_BUILD_TYPE=Release -DDDP_ROOT="$root" -DCMAKE_CXX_COMPILER="$cxx" -DCONSUMER_LANGUAGE=CXX -DCONSUMER_SOURCE=consumer.cpp
    "$cmake" --build found/cxx && found/cxx/consumer
    "$cmake" --build added/cxx && added/cxx/consumer
fi

if [ -n "$pkg_config" ]; then
    PKG_CONFIG_PATH=$work/prefix/share/pkgconfig
    export PKG_CONFIG_PATH
    [ "$("$pkg_config" --modversion ddp)" = "$version" ]
    "$cc" consumer.c $("$pkg_config" --cflags --libs ddp) -o consumer
    ./consumer
fi
echo "installed, found, added, fetched and linked"

# The functions that build test programs and register tests. tests/README.md is the manual.
#   ddp_program(NAME ...)   builds a program in each of its flavours
#   ddp_test(NAME ...)      builds a program, or takes one that exists, and registers its tests
#   ddp_read_flavour()      sets what differs between flavours
#   the other functions are parts of these; support/CMakeLists.txt uses two of them

if(POLICY CMP0116)
    cmake_policy(SET CMP0116 NEW) # DEPFILE may hold absolute paths
endif()

set(DDP_KNOWN_FLAVOURS plain o3 clang cxx asan tsan mpi mpi.asan cuda cuda.asan cuda.tsan fuzz arm64)

# These macros keep the implementations out of a source: its program links support/implementation*.c.
set(DDP_CORE_INCLUDED DDP_IMPLEMENTATION_INCLUDED DDP_FSDP_IMPLEMENTATION_INCLUDED)
set(DDP_SIBLINGS_INCLUDED DDP_PIPELINE_IMPLEMENTATION_INCLUDED DDP_TENSOR_IMPLEMENTATION_INCLUDED)

#== flavours ==========================================================================================

# Reads `flavour` and T_FAST_BUILD of the caller. Sets in the caller:
#   enabled                       whether this build has the flavour
#   suffix, slowdown              the end of target names; the factor of timeouts
#   labels, launcher, environment of its tests
#   optimize, sanitize, defines   for the compiler
#   compiler                      empty where CMake's C compiler builds it, as a CMake executable. Otherwise:
#   flags, link_flags             all other flags of the compiler and of the linker
#   bodies, included              targets of shared implementations; macros that keep them out of the source
macro(ddp_read_flavour)
    if(NOT flavour IN_LIST DDP_KNOWN_FLAVOURS)
        message(FATAL_ERROR "unknown flavour ${flavour}: use one of ${DDP_KNOWN_FLAVOURS}")
    endif()
    set(base "${flavour}") # the entry of DDP_TEST_FLAVOURS that enables it
    set(suffix "")
    set(slowdown 1)
    set(launcher "")
    set(environment "")
    set(sanitize "")
    if(flavour MATCHES "asan$")
        set(base asan)
        set(suffix .asan)
        set(slowdown 3)
        set(launcher "${DDP_TEST_SANITIZER_LAUNCHER}")
        set(sanitize -fsanitize=address,undefined -fno-sanitize-recover=all)
    elseif(flavour MATCHES "tsan$")
        set(base tsan)
        set(suffix .tsan)
        set(slowdown 6)
        set(launcher "${DDP_TEST_SANITIZER_LAUNCHER}")
        set(sanitize -fsanitize=thread)
    elseif(flavour MATCHES "^(clang|cxx)$")
        set(suffix ".${flavour}")
    elseif(flavour STREQUAL "fuzz")
        set(base clang)
        set(launcher "${DDP_TEST_SANITIZER_LAUNCHER}")
        set(sanitize -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all)
    elseif(flavour STREQUAL "arm64")
        set(slowdown 3)
        set(launcher "${DDP_QEMU_ARM64}")
    else()
        set(base plain)
    endif()

    set(labels "${base}")
    set(enabled FALSE)
    if(base IN_LIST DDP_TEST_FLAVOURS)
        set(enabled TRUE)
    endif()
    if(flavour MATCHES "^mpi")
        list(APPEND labels mpi)
        if(NOT DDP_TEST_LONG OR NOT MPI_C_FOUND OR NOT DDP_MPIRUN)
            set(enabled FALSE)
        endif()
        if(flavour STREQUAL "mpi.asan") # Open MPI leaks, and ddp.h keeps some memory until MPI ends
            set(environment
                "ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1:strict_string_checks=1")
        endif()
    elseif(flavour MATCHES "^cuda")
        list(APPEND labels cuda)
        set(environment "ASAN_OPTIONS=protect_shadow_gap=0")
        if(NOT DDP_TEST_LONG OR NOT DDP_NVCC)
            set(enabled FALSE)
        endif()
    elseif(flavour STREQUAL "arm64" AND DDP_ARM64 AND DDP_QEMU_ARM64)
        set(enabled TRUE)
    endif()

    set(optimize -O2)
    if(flavour STREQUAL "o3")
        set(optimize ${DDP_TEST_NATIVE})
    elseif(sanitize)
        set(optimize -O1 -fno-omit-frame-pointer)
    endif()
    if(T_FAST_BUILD OR flavour STREQUAL "mpi.asan")
        set(optimize -O0)
        if(base STREQUAL "asan")
            list(APPEND sanitize ${DDP_TEST_QUICK_CHECKS})
        endif()
    endif()

    set(defines "DDP_TEST_FLAVOUR=\"${flavour}\"" "DDP_TEST_SLOWDOWN=${slowdown}")
    if(flavour STREQUAL "o3")
        set(defines "DDP_TEST_FLAVOUR=\"plain\"" DDP_TEST_SLOWDOWN=1)
    elseif(flavour MATCHES "^mpi")
        list(APPEND defines DDP_USE_MPI)
    elseif(flavour MATCHES "^cuda")
        set(defines "DDP_TEST_SLOWDOWN=${slowdown}")
    elseif(flavour STREQUAL "fuzz")
        set(defines "")
    endif()

    set(compiler "")
    set(flags "")
    set(link_flags "")
    set(included ${DDP_CORE_INCLUDED})
    set(bodies "implementation.${base}")
    if(flavour STREQUAL "clang")
        set(compiler "${DDP_CLANG}")
        set(flags -std=gnu11 ${optimize} -g1 ${DDP_TEST_WARNINGS})
    elseif(flavour STREQUAL "cxx")
        set(compiler "${CMAKE_CXX_COMPILER}")
        set(flags -x c++ -std=c++17 ${DDP_TEST_GCC_WARNINGS} ${optimize} -g1 ${DDP_TEST_WARNINGS})
    elseif(flavour MATCHES "^cuda") # the C++ compiler (support/host_only.h); kernels run as loops on the CPU
        set(compiler "${CMAKE_CXX_COMPILER}")
        set(flags -O1)
        if(sanitize) # without forced inlining: the sanitizers would take minutes to compile the kernels
            set(flags -O0 "-DDDP__HD=__host__ __device__ inline" ${sanitize})
        endif()
        if(flavour STREQUAL "cuda.tsan" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
            list(APPEND flags -Wno-tsan)
        endif()
        set(flags -x c++ -std=c++17 ${flags} -g1 -ffp-contract=off -Wall -Wextra -Werror
            ${DDP_TEST_GCC_WARNINGS} ${DDP_CUDA_FLAGS})
        set(link_flags ${sanitize} "${DDP_CUDART_LIBRARY}" -ldl -lrt)
    elseif(flavour STREQUAL "fuzz")
        set(compiler "${DDP_CLANG}")
        set(link_flags ${sanitize} -Wno-pass-failed) # some loops are not vectorized
        set(flags -std=gnu11 -O1 -g1 ${DDP_TEST_WARNINGS} ${link_flags})
        set(included "")
        set(bodies "")
    elseif(flavour STREQUAL "arm64")
        set(compiler "${DDP_ARM64_CC}")
        set(flags -O1 -std=gnu11 -g1 ${DDP_TEST_WARNINGS} -Wno-maybe-uninitialized
            "-I${DDP_TEST_DIRECTORY}/support/arm64")
        set(link_flags -static) # qemu 7 hangs where a dynamic program starts a thread
        list(APPEND included ${DDP_SIBLINGS_INCLUDED})
        set(bodies arm64.implementation arm64.implementation_pipeline arm64.implementation_tensor)
    endif()
endmacro()

#== building ==========================================================================================

# Compiles `source` into ${DDP_TEST_OBJECTS}/`name`.o with `compiler` of the caller. ARGN: flags.
function(ddp_object name source)
    set(object "${DDP_TEST_OBJECTS}/${name}.o")
    set(includes ${DDP_TEST_INCLUDES})
    list(TRANSFORM includes PREPEND -I)
    file(RELATIVE_PATH depfile_target "${CMAKE_BINARY_DIR}" "${object}") # Ninja spells it this way
    if(POLICY CMP0116)
        set(depfile_target "${object}")
    endif()
    if(CMAKE_GENERATOR MATCHES "Ninja" OR NOT CMAKE_VERSION VERSION_LESS 3.20)
        set(dependencies DEPFILE "${object}.d")
    else()
        set(dependencies IMPLICIT_DEPENDS C "${source}")
    endif()
    add_custom_command(OUTPUT "${object}" DEPENDS "${source}" ${dependencies}
        COMMAND "${compiler}" ${ARGN} ${includes} -pthread -MD -MF "${object}.d" -MT "${depfile_target}"
            -c "${source}" -o "${object}"
        COMMENT "Building ${name}" VERBATIM)
endfunction()

# Sets the options of a CMake target from `optimize`, `sanitize` and `flavour` of the caller. ARGN: macros.
# -g1 keeps functions and lines, which is all that reports show. Full debug information takes gcc 50% longer.
function(ddp_compile_options target)
    set_target_properties("${target}" PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${DDP_TEST_BINARIES}"
        C_STANDARD 11 C_EXTENSIONS ON)
    target_compile_definitions("${target}" PRIVATE ${ARGN})
    target_compile_options("${target}" PRIVATE
        ${optimize} -g1 -UNDEBUG ${DDP_TEST_WARNINGS} ${DDP_TEST_GCC_WARNINGS} ${sanitize})
    if(CMAKE_C_COMPILER_ID STREQUAL "GNU" AND sanitize MATCHES "thread")
        target_compile_options("${target}" PRIVATE -Wno-tsan) # a warning that fences are not modelled
    endif()
    target_include_directories("${target}" PRIVATE ${DDP_TEST_INCLUDES})
endfunction()

# Sets `variable` to the path of a file in the folder of the list, or below the top level of the project.
function(ddp_find_source variable file)
    get_filename_component(path "${file}" ABSOLUTE)
    if(NOT EXISTS "${path}")
        get_filename_component(path "${file}" ABSOLUTE BASE_DIR "${PROJECT_SOURCE_DIR}")
    endif()
    if(NOT EXISTS "${path}")
        message(FATAL_ERROR "${name}: ${file} is neither in ${CMAKE_CURRENT_SOURCE_DIR} "
            "nor in ${PROJECT_SOURCE_DIR}: name an existing file")
    endif()
    set(${variable} "${path}" PARENT_SCOPE)
endfunction()

function(ddp_program name)
    cmake_parse_arguments(T "STANDALONE;FAST_BUILD" "SOURCE" "FLAVOURS;LIBS;DEFINES" ${ARGN})
    if(T_UNPARSED_ARGUMENTS OR NOT T_SOURCE OR NOT T_FLAVOURS)
        message(FATAL_ERROR "${name}: SOURCE and FLAVOURS are required, unknown: ${T_UNPARSED_ARGUMENTS}")
    endif()
    ddp_find_source(source "${T_SOURCE}")
    foreach(flavour ${T_FLAVOURS})
        ddp_read_flavour()
        if(NOT enabled)
            continue()
        endif()
        set(target "${name}${suffix}")
        if(T_STANDALONE)
            set(bodies "")
            set(included "")
        endif()

        if(compiler)
            set(macros ${included} ${defines} ${T_DEFINES})
            list(TRANSFORM macros PREPEND -D)
            ddp_object("${target}" "${source}" ${flags} ${macros})
            set(objects "${DDP_TEST_OBJECTS}/${target}.o")
            foreach(body ${bodies})
                if(flavour MATCHES "^cuda")
                    list(APPEND objects "$<TARGET_OBJECTS:${body}>")
                else()
                    list(APPEND objects "${DDP_TEST_OBJECTS}/${body}.o")
                endif()
            endforeach()
            foreach(lib ${T_LIBS})
                if(TARGET "${lib}")
                    get_target_property(lib "${lib}" IMPORTED_LOCATION)
                elseif(NOT lib MATCHES "^[-/]") # neither a flag nor a path
                    set(lib "-l${lib}")
                endif()
                list(APPEND link_flags "${lib}")
            endforeach()
            set(path "${DDP_TEST_BINARIES}/${target}")
            add_custom_command(OUTPUT "${path}" DEPENDS ${objects}
                COMMAND "${compiler}" -pthread ${objects} ${link_flags} -lm -o "${path}"
                COMMENT "Linking ${target}" VERBATIM)
            add_custom_target("${target}" ALL DEPENDS "${path}")
            if(bodies)
                add_dependencies("${target}" ${bodies}) # so that a parallel make builds them once
            endif()
        elseif(TARGET "${target}") # an example, which the top level builds as a user would
            target_compile_options("${target}" PRIVATE ${DDP_TEST_WARNINGS} ${DDP_TEST_GUESSES})
        else()
            add_executable("${target}" "${source}")
            ddp_compile_options("${target}" ${defines} ${T_DEFINES})
            set(libs ddp::ddp ${T_LIBS})
            if(flavour MATCHES "^mpi")
                list(APPEND libs MPI::MPI_C)
            endif()
            target_link_libraries("${target}" PRIVATE ${libs} ${sanitize})
            if(flavour STREQUAL "o3" AND CMAKE_C_COMPILER_ID STREQUAL "GNU") # it has no cmocka
                target_compile_options("${target}" PRIVATE -Wmaybe-uninitialized)
            endif()
            if(NOT T_STANDALONE)
                target_compile_definitions("${target}" PRIVATE ${DDP_CORE_INCLUDED} ${DDP_SIBLINGS_INCLUDED})
                target_sources("${target}" PRIVATE "$<TARGET_OBJECTS:implementation.${flavour}>")
                if(NOT flavour STREQUAL "mpi.asan") # its tests need neither pipelines nor tensors
                    target_link_libraries("${target}" PRIVATE "siblings.${flavour}")
                endif()
            endif()
        endif()
    endforeach()
endfunction()

#== registering =======================================================================================

# Registers one test of ddp_test, whose variables it reads. ARGN: the command.
function(ddp_add_test test environment)
    add_test(NAME "${test}" COMMAND ${ARGN})
    # The limit of ctest only ends tests that their watchdog does not: machines can be slow or busy.
    math(EXPR timeout "${T_TIMEOUT} * ${slowdown} * 3 + 20")
    set_tests_properties("${test}" PROPERTIES TIMEOUT "${timeout}" PROCESSORS "${T_PROCESSORS}"
        LABELS "${labels};${T_LABELS}" RUN_SERIAL "${T_SERIAL}"
        ENVIRONMENT "${DDP_TEST_ENVIRONMENT};${environment}"
        WORKING_DIRECTORY "${DDP_TEST_WORK}" SKIP_RETURN_CODE 77)
    if(T_LOCK)
        set_tests_properties("${test}" PROPERTIES RESOURCE_LOCK "${T_LOCK}")
    endif()
    if(T_COST)
        set_tests_properties("${test}" PROPERTIES COST "${T_COST}")
    endif()
    if(T_IMPORTS AND NOT DDP_PYTHON_${T_IMPORTS})
        set_tests_properties("${test}" PROPERTIES DISABLED TRUE)
    endif()
endfunction()

function(ddp_test name)
    cmake_parse_arguments(T "STANDALONE;FAST_BUILD;SERIAL"
        "SOURCE;PROGRAM;SCRIPT;IMPORTS;MPIRUN;TIMEOUT;PROCESSORS;LOCK;COST"
        "FLAVOURS;RUNS;ARGS;LIBS;DEFINES;LABELS;ENVIRONMENT" ${ARGN})
    if(T_UNPARSED_ARGUMENTS)
        message(FATAL_ERROR "${name}: unknown arguments ${T_UNPARSED_ARGUMENTS}")
    endif()
    if("long" IN_LIST T_LABELS AND NOT DDP_TEST_LONG)
        return()
    endif()
    set(interpreter "")
    set(script "")
    if(T_SCRIPT)
        ddp_find_source(script "${T_SCRIPT}")
        set(interpreter sh)
        if(DDP_PYTHON_${T_IMPORTS})
            set(interpreter "${DDP_PYTHON_${T_IMPORTS}}")
        elseif(script MATCHES "[.]py$")
            set(interpreter "${DDP_PYTHON}")
        endif()
    elseif(NOT T_PROGRAM AND NOT T_SOURCE) # unit.core: test_core.c
        string(REGEX REPLACE "^[^.]*[.]" "" T_SOURCE "${name}")
        set(T_SOURCE "test_${T_SOURCE}.c")
    endif()

    # Defaults.
    if(NOT T_FLAVOURS)
        set(T_FLAVOURS plain asan)
        if(T_SCRIPT)
            set(T_FLAVOURS plain)
        endif()
    endif()
    if(NOT T_TIMEOUT)
        set(T_TIMEOUT 60)
        if(T_SCRIPT)
            set(T_TIMEOUT 120)
        endif()
    endif()
    if(NOT T_PROCESSORS)
        set(T_PROCESSORS 1)
        if(T_FLAVOURS MATCHES "mpi")
            set(T_PROCESSORS 2)
        endif()
    endif()
    if(T_LOCK AND NOT T_COST)
        set(T_COST 1000) # tests with a lock run one after the other: they start first
    endif()

    if(T_SOURCE)
        if(NOT "asan" IN_LIST DDP_TEST_FLAVOURS) # plain replaces asan, mpi replaces mpi.asan
            list(TRANSFORM T_FLAVOURS REPLACE "^asan$" plain)
            list(TRANSFORM T_FLAVOURS REPLACE "^mpi[.]asan$" mpi)
            list(REMOVE_DUPLICATES T_FLAVOURS)
        endif()
        set(options "")
        foreach(option STANDALONE FAST_BUILD)
            if(T_${option})
                list(APPEND options ${option})
            endif()
        endforeach()
        ddp_program("${name}" ${options} SOURCE "${T_SOURCE}" FLAVOURS ${T_FLAVOURS} LIBS ${T_LIBS}
            DEFINES ${T_DEFINES})
        set(T_PROGRAM "${name}")
    endif()

    foreach(flavour ${T_FLAVOURS})
        ddp_read_flavour()
        if(NOT enabled)
            continue()
        endif()
        list(APPEND environment ${T_ENVIRONMENT})
        if(T_SCRIPT)
            list(APPEND environment "DDP_TEST_SLOWDOWN=${slowdown}")
        endif()
        set(program "")
        if(T_PROGRAM)
            set(program "${DDP_TEST_BINARIES}/${T_PROGRAM}${suffix}")
            if(TARGET "${T_PROGRAM}${suffix}" AND NOT compiler) # the top level may have built it elsewhere
                set(program "$<TARGET_FILE:${T_PROGRAM}${suffix}>")
            endif()
        endif()
        set(command ${interpreter} "${script}" "${program}" ${T_ARGS})
        list(REMOVE_ITEM command "")

        # "asan:processes 3" is a run of the flavour asan only, which then leaves out those without a flavour.
        set(runs "${T_RUNS}")
        list(FILTER runs INCLUDE REGEX "^${flavour}:")
        list(TRANSFORM runs REPLACE "^${flavour}:" "")
        if(NOT runs)
            set(runs "${T_RUNS}")
            list(FILTER runs EXCLUDE REGEX "^[a-z0-9.]+:")
        endif()
        foreach(run ${runs})
            string(REPLACE " " ";" words "${run}")
            string(REGEX REPLACE "[A-Z]+=" "" run_name "${run}")
            string(REPLACE " " "_" run_name "${run_name}")
            set(variables "${words}") # NAME=value is the environment variable DDP_TEST_NAME
            list(FILTER variables INCLUDE REGEX "^[A-Z]+=")
            list(TRANSFORM variables PREPEND DDP_TEST_)
            list(FILTER words EXCLUDE REGEX "^[A-Z]+=")
            set(mpirun "")
            if(flavour MATCHES "^mpi") # "4by2 args" or "4 args"
                list(POP_FRONT words ranks)
                string(REPLACE "by" ";" ranks "${ranks};64")
                list(GET ranks 0 count)
                list(GET ranks 1 block)
                list(APPEND variables "DDP_TEST_BLOCK=${block}")
                set(mpirun "${DDP_MPIRUN}" -n ${count})
            endif()
            ddp_add_test("${name}.${run_name}${suffix}" "${environment};${variables}"
                ${launcher} ${mpirun} ${command} ${words})
        endforeach()
        if(NOT runs)
            ddp_add_test("${name}${suffix}" "${environment}" ${launcher} ${command})
        endif()
        if(T_MPIRUN AND DDP_MPIRUN AND flavour STREQUAL "plain")
            string(REPLACE " " ";" words "${T_MPIRUN}")
            list(POP_FRONT words count)
            ddp_add_test("${name}.mpirun" "${environment}" "${DDP_MPIRUN}" -n ${count} ${command} ${words})
        endif()
    endforeach()
endfunction()

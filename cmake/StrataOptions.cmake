# Compiler settings shared by every layer, and the libraries that the core stands on.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo)
endif()

option(STRATA_WERROR "Treat warnings as errors" OFF)
# For whole builds. After a change of one file, its neighbours are compiled as well, and a missing include is not found.
# So the preset for daily work compiles each file alone.
option(STRATA_UNITY "Compile several files of a layer at once and precompile what tests include" OFF)
set(STRATA_SANITIZE "" CACHE STRING "Sanitizers for every target, e.g. address,undefined or thread")

# ccache, told that precompiled headers are fine and that build folders beside each other may share.
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
    env CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_NOHASHDIR=1
    CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} ${CCACHE_PROGRAM})
endif()

find_program(MOLD_PROGRAM mold)  # it links a test program in a tenth of ld's time

if(STRATA_SANITIZE)
  add_compile_options(-fsanitize=${STRATA_SANITIZE} -fno-sanitize-recover=all
                      -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${STRATA_SANITIZE})
  if(STRATA_SANITIZE MATCHES "address")
    add_compile_definitions(STRATA_ASAN)  # compilers have macros of different names
  endif()
endif()

# Strata's targets link it PRIVATE, so that it does not reach users of the installed package.
add_library(strata_warnings INTERFACE)
target_compile_options(strata_warnings INTERFACE
  -Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -Wold-style-cast -Wnon-virtual-dtor
  -Woverloaded-virtual -Wcast-align -Wimplicit-fallthrough
  $<$<BOOL:${STRATA_WERROR}>:-Werror>)

find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(HWY REQUIRED IMPORTED_TARGET libhwy)
find_package(StrataUring 2.3 REQUIRED)
if(STRATA_BUILD_TORCH OR STRATA_BUILD_PYTHON)
  include(StrataTorch)
endif()

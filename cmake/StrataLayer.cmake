# strata_unity(target files): compiles `files` files of the target at once, if STRATA_UNITY is on. Names in anonymous
# namespaces have to differ within a target. A file that Highway compiles once for each instruction set stays alone:
# set_source_files_properties(... SKIP_UNITY_BUILD_INCLUSION ON).
function(strata_unity target files)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${STRATA_UNITY} UNITY_BUILD_BATCH_SIZE ${files})
  if(STRATA_UNITY)
    # g++ treats an included .cpp as a header, and warns of anonymous types in it.
    target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  endif()
endfunction()

# strata_precompiles(target header ...): compiles these headers once for the target, with the options that ccache needs.
function(strata_precompiles target)
  target_precompile_headers(${target} PRIVATE ${ARGN})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -fpch-preprocess)
  elseif(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    target_compile_options(${target} PRIVATE "SHELL:-Xclang -fno-pch-timestamp")
  endif()
endfunction()

# strata_layer(NAME name SOURCES a.cpp ... HEADERS a.h ... DEPENDS layer ... LINK library ...)
# Declares one layer as the static library strata_<name>, strata::<name> to users of the installed
# package. DEPENDS names the layers below it; its files may include only those (tests/tidy checks the includes). HEADERS
# are installed.
function(strata_layer)
  cmake_parse_arguments(L "" "NAME" "SOURCES;HEADERS;DEPENDS;LINK" ${ARGN})
  add_library(strata_${L_NAME} STATIC ${L_SOURCES})
  add_library(strata::${L_NAME} ALIAS strata_${L_NAME})
  set_target_properties(strata_${L_NAME} PROPERTIES EXPORT_NAME ${L_NAME})
  if(STRATA_SANITIZE)  # what a test needs is built, and nothing else
    set_target_properties(strata_${L_NAME} PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
  if(STRATA_SANITIZE MATCHES "address" AND L_NAME MATCHES "^(config|comm)$")  # optimizing takes longer than it saves
    target_compile_options(strata_${L_NAME} PRIVATE -O0)
  endif()
  target_sources(strata_${L_NAME} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}/src
                 FILES ${L_HEADERS})
  target_include_directories(strata_${L_NAME} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src> $<INSTALL_INTERFACE:include>)
  target_compile_features(strata_${L_NAME} PUBLIC cxx_std_20)
  if(STRATA_BUILD_FUZZ AND L_NAME MATCHES "^(base|io|format)$")  # what the fuzz targets call
    target_compile_options(strata_${L_NAME} PRIVATE -fsanitize=fuzzer-no-link)
  endif()
  strata_unity(strata_${L_NAME} 10)
  target_link_libraries(strata_${L_NAME} PRIVATE $<BUILD_INTERFACE:strata_warnings>)
  foreach(dep IN LISTS L_DEPENDS)
    target_link_libraries(strata_${L_NAME} PUBLIC strata_${dep})
  endforeach()
  if(L_LINK)
    target_link_libraries(strata_${L_NAME} PUBLIC ${L_LINK})
  endif()
  set_property(GLOBAL APPEND PROPERTY STRATA_LAYERS ${L_NAME})
endfunction()

# strata_compiles_tests(target): the options of test programs. A test runs for a moment, so good optimization is not
# worth g++'s time, and under a sanitizer no optimization is. UBSan doubles the compile time of a test; it is for the
# code that tests call, which is built with it.
function(strata_compiles_tests target)
  # g++ 12 sees overlapping copies in string concatenation where there are none (GCC bug 105651).
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
                         $<$<CONFIG:Release>:-O1>)
  if(STRATA_SANITIZE)
    target_compile_options(${target} PRIVATE -O0)
  endif()
  if(STRATA_SANITIZE MATCHES "undefined")
    target_compile_options(${target} PRIVATE -fno-sanitize=undefined)
  endif()
endfunction()

# strata_test(NAME name SOURCES a_test.cpp ... LINK target ... [TIMEOUT seconds] [LABEL core|torch] [RANKS])
# One GoogleTest program and one ctest entry. RANKS: its ranks wait for each other, spinning first, and have two
# cores to themselves; beside another such program each takes several times as long. Programs with the label core (the
# default) also run under the sanitizers; the label torch is for programs that link torch.
function(strata_test)
  cmake_parse_arguments(T "RANKS" "NAME;TIMEOUT;LABEL" "SOURCES;LINK" ${ARGN})
  if(NOT T_TIMEOUT)
    set(T_TIMEOUT 300)
  endif()
  if(STRATA_SANITIZE)  # sanitizers take up to ten times as long; the bound is there to end what hangs
    math(EXPR T_TIMEOUT "${T_TIMEOUT} * 4")
  endif()
  if(NOT T_LABEL)
    set(T_LABEL core)
  endif()
  add_executable(${T_NAME} ${T_SOURCES})
  target_link_libraries(${T_NAME} PRIVATE ${T_LINK} strata_warnings GTest::gtest GTest::gmock GTest::gtest_main)
  strata_compiles_tests(${T_NAME})
  if(T_LABEL STREQUAL "core")
    strata_unity(${T_NAME} 8)
    if(STRATA_UNITY)
      target_precompile_headers(${T_NAME} REUSE_FROM strata_test_headers)
    endif()
  endif()
  target_include_directories(${T_NAME} PRIVATE ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR}/src)
  if(MOLD_PROGRAM)
    target_link_options(${T_NAME} PRIVATE -fuse-ld=mold)
  endif()
  add_test(NAME ${T_NAME} COMMAND ${T_NAME} --gtest_brief=1)
  set_tests_properties(${T_NAME} PROPERTIES TIMEOUT ${T_TIMEOUT} LABELS ${T_LABEL})
  if(T_RANKS)
    set_tests_properties(${T_NAME} PROPERTIES PROCESSORS 2)
  endif()
endfunction()

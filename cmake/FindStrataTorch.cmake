# Finds libtorch of the pip wheel (or of the libtorch archive, which has the same folders) without
# torch's own CMake package, which asks for a CUDA toolkit whenever the wheel was built with one.
#
# Looked at, in this order:
#   STRATA_TORCH_DIR   the folder that holds torch's include/ and lib/
#   Python_EXECUTABLE  a Python that has torch installed
#   $VIRTUAL_ENV/bin/python, then python3 of PATH
#
# Gives:
#   strata_libtorch         headers (as SYSTEM) and libraries for C++; no Python header needed
#   strata_libtorch_python  the same plus libtorch_python and the Python headers; only when
#                           find_package(Python COMPONENTS Development.Module) was successful before
#   StrataTorch_DIR_USED, StrataTorch_LIBRARY_DIR, StrataTorch_VERSION
#
# A program that is linked to strata_libtorch has the folder of the libraries as its build-time RPATH. The wheel has no
# gloo headers, so c10d/ProcessGroupGloo.hpp cannot be included: process groups come from Python, or through
# c10d::ProcessGroup and c10d::Backend. CUDA needs libtorch_cuda.so, of which a program uses no symbol: it must load it
# by dlopen("libtorch_cuda.so"); under Python `import torch` has done so already.

include(FindPackageHandleStandardArgs)

set(STRATA_TORCH_DIR "" CACHE PATH "Folder with torch's include/ and lib/; empty: ask Python")

function(_strata_torch_ask python result)
  execute_process(
    COMMAND ${python} -c
      "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(${result} "${answer}" PARENT_SCOPE)
endfunction()

set(StrataTorch_DIR_USED "${STRATA_TORCH_DIR}")
if(NOT StrataTorch_DIR_USED)
  foreach(_python IN ITEMS "${Python_EXECUTABLE}" "$ENV{VIRTUAL_ENV}/bin/python" python3)
    if(_python AND NOT StrataTorch_DIR_USED)
      _strata_torch_ask("${_python}" StrataTorch_DIR_USED)
    endif()
  endforeach()
endif()

find_path(StrataTorch_INCLUDE_DIR torch/csrc/api/include/torch/torch.h
  PATHS ${StrataTorch_DIR_USED}/include NO_DEFAULT_PATH NO_CACHE)
set(StrataTorch_LIBRARY_DIR "${StrataTorch_DIR_USED}/lib")
foreach(_library torch torch_cpu c10)
  find_library(StrataTorch_${_library} ${_library}
    PATHS ${StrataTorch_LIBRARY_DIR} NO_DEFAULT_PATH NO_CACHE)
endforeach()
set(_version_header "${StrataTorch_INCLUDE_DIR}/torch/headeronly/version.h")
if(StrataTorch_INCLUDE_DIR AND EXISTS "${_version_header}")
  file(STRINGS "${_version_header}" _lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
  string(REGEX REPLACE "[^;]*VERSION_[A-Z]+ +([0-9]+)[^;]*" "\\1" _numbers "${_lines}")
  list(JOIN _numbers "." StrataTorch_VERSION)
endif()

find_package_handle_standard_args(StrataTorch
  REQUIRED_VARS StrataTorch_INCLUDE_DIR StrataTorch_torch_cpu StrataTorch_c10 StrataTorch_torch
  VERSION_VAR StrataTorch_VERSION
  REASON_FAILURE_MESSAGE
    "No torch was found (looked in '${StrataTorch_DIR_USED}'). Install it with `pip install torch`, or name its folder with -DSTRATA_TORCH_DIR=.../site-packages/torch, or a Python that has it with -DPython_EXECUTABLE=...")

if(StrataTorch_FOUND AND NOT TARGET strata_libtorch)
  foreach(_library torch torch_cpu c10)
    add_library(strata_libtorch_${_library} SHARED IMPORTED)
    set_target_properties(strata_libtorch_${_library} PROPERTIES
      IMPORTED_LOCATION ${StrataTorch_${_library}})
  endforeach()
  add_library(strata_libtorch INTERFACE IMPORTED)
  target_include_directories(strata_libtorch SYSTEM INTERFACE
    ${StrataTorch_INCLUDE_DIR} ${StrataTorch_INCLUDE_DIR}/torch/csrc/api/include)
  find_package(Threads REQUIRED)
  # Unresolved symbols inside libtorch_cpu.so are those of the wheel's CUDA runtime. The loader finds it beside torch;
  # the linker does not have to.
  target_link_libraries(strata_libtorch INTERFACE
    strata_libtorch_torch_cpu strata_libtorch_c10 Threads::Threads)
  target_link_options(strata_libtorch INTERFACE -Wl,--allow-shlib-undefined)
endif()

if(StrataTorch_FOUND AND TARGET Python::Module AND NOT TARGET strata_libtorch_python)
  find_library(StrataTorch_torch_python torch_python
    PATHS ${StrataTorch_LIBRARY_DIR} NO_DEFAULT_PATH NO_CACHE REQUIRED)
  add_library(strata_libtorch_torch_python SHARED IMPORTED)
  set_target_properties(strata_libtorch_torch_python PROPERTIES
    IMPORTED_LOCATION ${StrataTorch_torch_python})
  add_library(strata_libtorch_python INTERFACE IMPORTED)
  target_link_libraries(strata_libtorch_python INTERFACE
    strata_libtorch strata_libtorch_torch_python Python::Module)
endif()

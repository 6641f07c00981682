# Finds Python and torch for the layers that include torch, and limits the memory and time of compiling them.
set(_components Interpreter)
if(STRATA_BUILD_PYTHON)
  list(APPEND _components Development.Module)
endif()
find_package(Python 3.10 REQUIRED COMPONENTS ${_components})
# Folders with torch's include/ and lib/ for each of which the package gets a module; empty: for the torch that is found.
set(STRATA_TORCH_DIRS "" CACHE STRING "Folders of several versions of torch, one Python module each")
if(STRATA_TORCH_DIRS AND NOT STRATA_TORCH_DIR)
  list(GET STRATA_TORCH_DIRS 0 STRATA_TORCH_DIR)
endif()
find_package(StrataTorch 2.11 REQUIRED)

# A file that includes torch takes 2 to 3 GiB to compile, so memory limits the number at once.
cmake_host_system_information(RESULT _memory_mib QUERY TOTAL_PHYSICAL_MEMORY)
math(EXPR _torch_jobs "${_memory_mib} / 3072")
if(_torch_jobs LESS 1)
  set(_torch_jobs 1)
endif()
set_property(GLOBAL APPEND PROPERTY JOB_POOLS strata_torch_jobs=${_torch_jobs})

# strata_compiles_torch(target [PCH header ...]): for a target whose files include torch. PCH names the
# headers to precompile, e.g. <ATen/ATen.h>: those that nearly every file of the target includes.
function(strata_compiles_torch target)
  cmake_parse_arguments(T "" "" "PCH" ${ARGN})
  set_target_properties(${target} PROPERTIES JOB_POOL_COMPILE strata_torch_jobs)
  strata_unity(${target} 9)
  # Torch brings fmt headers of its own version, which come first here; the linked libfmt is another one.
  target_compile_definitions(${target} PRIVATE FMT_HEADER_ONLY=1)
  if(T_PCH)
    strata_precompiles(${target} ${T_PCH})
  endif()
endfunction()

# strata_torch_headers(target): for a static library of the torch layer's files.
function(strata_torch_headers target)
  strata_compiles_torch(${target} PCH <ATen/core/Tensor.h> <torch/csrc/autograd/variable.h>
                        <torch/csrc/autograd/engine.h>)
endfunction()

# Looks for nvcc and the driver's header: of a CUDA toolkit, or of the pip packages nvidia-cuda-nvcc
# and nvidia-cuda-runtime, which requirements.txt names. Without them the build has no CUDA device.
#
#   STRATA_CUDA              AUTO (take what is found), ON (an error when nothing is), OFF
#   STRATA_CUDA_FATBIN       kernels that another build has compiled, so that this one need not
#   STRATA_NVCC              the compiler; false without
#   STRATA_CUDA_INCLUDE_DIR  where cuda.h is
set(STRATA_CUDA AUTO CACHE STRING "The CUDA device: AUTO, ON or OFF")
set(STRATA_CUDA_FATBIN "" CACHE FILEPATH "Compiled CUDA kernels of another build; empty: compile them")
# Ampere, Hopper and Blackwell as machine code; the driver of a later device compiles Blackwell's intermediate code.
set(STRATA_CUDA_ARCHITECTURES
    -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90
    -gencode=arch=compute_100,code=sm_100 -gencode=arch=compute_100,code=compute_100)

set(STRATA_NVCC FALSE)
if(STRATA_CUDA)
  set(_python ${Python_EXECUTABLE})
  if(NOT _python)
    set(_python python3)
  endif()
  execute_process(COMMAND ${_python} -c "import nvidia, os; print(os.path.join(list(nvidia.__path__)[0], 'cu13'))"
                  OUTPUT_VARIABLE _wheel OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  # The system's toolkit first: a user who installed one expects it.
  find_program(STRATA_NVCC_PATH nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH
               PATHS /usr/local/cuda /opt/cuda ${_wheel} PATH_SUFFIXES bin)
  if(STRATA_NVCC_PATH)
    file(REAL_PATH ${STRATA_NVCC_PATH} _nvcc)
    get_filename_component(_toolkit ${_nvcc} DIRECTORY)
    get_filename_component(_toolkit ${_toolkit} DIRECTORY)
    find_path(STRATA_CUDA_INCLUDE_DIR cuda.h
              PATHS ${_toolkit}/include ${_toolkit}/targets/x86_64-linux/include ${_wheel}/include NO_DEFAULT_PATH)
  endif()
  if(STRATA_NVCC_PATH AND STRATA_CUDA_INCLUDE_DIR)
    set(STRATA_NVCC ${STRATA_NVCC_PATH})
    message(STATUS "CUDA device: ${STRATA_NVCC}")
  elseif(STRATA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "STRATA_CUDA is ON, but nvcc or cuda.h was not found. Install a CUDA toolkit, or "
                        "`pip install -r requirements.txt`, or name the compiler with -DSTRATA_NVCC_PATH=...")
  else()
    message(STATUS "CUDA device: left out, no nvcc was found")
  endif()
endif()

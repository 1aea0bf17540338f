# What CUDA code needs here: it is compiled by the host's compiler onto the emulator of its tests (tests/cuda_emu), for which
# NVIDIA's headers are enough: from a toolkit, or from where `./setup --cuda-headers` puts them.
option(REGATHER_CUDA_EMULATOR_REQUIRED "Fail without what the CUDA emulator's tests need, instead of leaving them out" "$ENV{REGATHER_CUDA_EMULATOR_REQUIRED}")

file(GLOB regather_cuda_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tensor/cuda/*.cpp")

# Sets REGATHER_CUDA_INCLUDE_DIRS, and REGATHER_CUDA_MISSING to what is not there (empty: nothing).
function(find_cuda_headers)
  set(missing "")
  set(include_dirs "")
  foreach(header cuda_runtime.h cublas_v2.h nccl.h)
    string(MAKE_C_IDENTIFIER "REGATHER_PATH_OF_${header}" variable)
    find_path(${variable} ${header} HINTS "${PROJECT_SOURCE_DIR}/.cuda/include" ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES include)
    mark_as_advanced(${variable})
    if(${variable})
      list(APPEND include_dirs "${${variable}}")
    else()
      list(APPEND missing "${header}")
    endif()
  endforeach()
  find_package(Boost QUIET COMPONENTS context)
  if(NOT TARGET Boost::context)
    list(APPEND missing "Boost.Context")
  endif()
  list(REMOVE_DUPLICATES include_dirs)
  string(REPLACE ";" ", " missing "${missing}")
  set(REGATHER_CUDA_INCLUDE_DIRS "${include_dirs}" PARENT_SCOPE)
  set(REGATHER_CUDA_MISSING "${missing}" PARENT_SCOPE)
endfunction()

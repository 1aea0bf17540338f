# The CUDA backend (tensor/cuda, tensor/ops/*.cu, and what moves the memory of GPUs in dist) in two ways: compiled by nvcc and linked with NVIDIA's libraries
# (REGATHER_CUDA), and compiled by the host's compiler onto the emulator that its tests run on (tests/cuda_emu), for which
# NVIDIA's headers are enough: from a toolkit, or from where `./setup --cuda-headers` puts them.
option(REGATHER_CUDA "Build the CUDA backend with nvcc" OFF)
option(REGATHER_CUDA_EMULATOR_REQUIRED "Fail without what the CUDA emulator's tests need, instead of leaving them out" "$ENV{REGATHER_CUDA_EMULATOR_REQUIRED}")

file(GLOB regather_cuda_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tensor/cuda/*.cpp" "${PROJECT_SOURCE_DIR}/tensor/cuda/*.cu"
     "${PROJECT_SOURCE_DIR}/tensor/ops/*.cu")
file(GLOB regather_nccl_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/dist/nccl_*.cpp" "${PROJECT_SOURCE_DIR}/dist/staged_*.cpp")

# Sets REGATHER_CUDA_INCLUDE_DIRS, and REGATHER_CUDA_MISSING to what is not there (empty: nothing).
function(find_cuda_headers)
  set(missing "")
  set(include_dirs "")
  foreach(header cuda_runtime.h cublas_v2.h cublasLt.h nccl.h)
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

# What a program without nvcc says of `device: cuda`; the tests on the emulator bring their own.
if(NOT REGATHER_CUDA)
  target_sources(regather_tensor PRIVATE "${PROJECT_SOURCE_DIR}/tensor/no_cuda.cpp")
  target_sources(regather_dist PRIVATE "${PROJECT_SOURCE_DIR}/dist/no_nccl.cpp")
  return()
endif()

set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)  # otherwise the static one is linked beside it
set(CMAKE_CUDA_ARCHITECTURES 80 90 100 CACHE STRING "GPUs to build for")
enable_language(CUDA)
foreach(kind STANDARD EXTENSION)  # CMake 3.25 knows nvcc's dialects up to 17 only
  if(NOT CMAKE_CUDA20_${kind}_COMPILE_OPTION)
    set(CMAKE_CUDA20_${kind}_COMPILE_OPTION -std=c++20)
  endif()
endforeach()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
find_package(CUDAToolkit REQUIRED)

# Registers, shared memory and spills of each kernel are printed; a spill is an error.
add_library(regather_cuda STATIC ${regather_cuda_sources})
set_target_properties(regather_cuda PROPERTIES OPTIMIZE_DEPENDENCIES ON)  # it alone can be built: nothing else is compiled for it
target_compile_options(regather_cuda PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wconversion;-Werror>
  "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;--Werror=all-warnings;-Xptxas=-v,-warn-spills,-Werror;-Xcompiler=-Wall,-Wextra>")
target_link_libraries(regather_cuda PUBLIC regather_tensor CUDA::cudart CUDA::cublas CUDA::cublasLt)
target_link_libraries(regather_tensor PUBLIC $<LINK_ONLY:regather_cuda>)  # no headers of CUDA: other sources compile as without it

find_path(REGATHER_NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
find_library(REGATHER_NCCL_LIBRARY nccl HINTS "${CUDAToolkit_LIBRARY_DIR}" "${CUDAToolkit_LIBRARY_ROOT}/lib")
if(NOT REGATHER_NCCL_INCLUDE_DIR OR NOT REGATHER_NCCL_LIBRARY)
  message(FATAL_ERROR "REGATHER_CUDA needs NCCL: nccl.h and libnccl.so were not found (REGATHER_NCCL_INCLUDE_DIR, REGATHER_NCCL_LIBRARY)")
endif()
add_library(regather_nccl STATIC ${regather_nccl_sources})
set_target_properties(regather_nccl PROPERTIES OPTIMIZE_DEPENDENCIES ON)
target_include_directories(regather_nccl SYSTEM PRIVATE "${REGATHER_NCCL_INCLUDE_DIR}")
target_link_libraries(regather_nccl PUBLIC regather_dist "$<BUILD_INTERFACE:${REGATHER_NCCL_LIBRARY}>" $<INSTALL_INTERFACE:nccl> PRIVATE $<BUILD_INTERFACE:regather_flags>)
target_link_libraries(regather_dist PUBLIC $<LINK_ONLY:regather_nccl>)

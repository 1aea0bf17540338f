# add_layer(name DEPENDS layers...): one folder at the repository root becomes the static library regather_<name>.
# Sources are found by name: <name>/*.cpp and <name>/*/*.cpp, except backends (see RegatherBackends.cmake), cuda/ (see
# RegatherCuda.cmake) and main/.
add_library(regather_flags INTERFACE)
target_compile_options(regather_flags INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wnon-virtual-dtor -ffp-contract=off)
# g++ 12 reports -Wrestrict inside std::string's operator+ (its bug 105329).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(regather_flags INTERFACE -Wno-restrict)
endif()
if(REGATHER_WERROR)
  target_compile_options(regather_flags INTERFACE -Werror)
endif()
if(REGATHER_SANITIZE)
  # Sanitized code makes g++ report -Wmaybe-uninitialized inside the standard library.
  add_compile_options(-fsanitize=${REGATHER_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -Wno-maybe-uninitialized)
  add_link_options(-fsanitize=${REGATHER_SANITIZE})
endif()

# For what computes nothing, in sanitized builds, of which compiling is the larger part. It is not optimised. Null pointers are left
# to AddressSanitizer; alignment and types behind pointers (vptr) are not checked there, only in the layers that compute.
function(build_quickly target how)
  target_compile_options(${target} ${how} -O0)
  if(REGATHER_SANITIZE MATCHES "undefined")
    target_compile_options(${target} ${how} -fno-sanitize=null,alignment,vptr)
  endif()
endfunction()

function(precompile target)
  if(REGATHER_PRECOMPILE)
    target_precompile_headers(${target} PRIVATE ${ARGN})
  endif()
endfunction()

function(add_layer name)
  cmake_parse_arguments(ARG "" "" "DEPENDS" ${ARGN})
  set(root "${PROJECT_SOURCE_DIR}")
  file(GLOB sources CONFIGURE_DEPENDS "${root}/${name}/*.cpp" "${root}/${name}/*/*.cpp")
  list(FILTER sources EXCLUDE REGEX "/(mpi_|no_|nccl_|staged_|main/|cuda/)[^/]*\\.cpp$")
  set(target regather_${name})
  add_library(${target} STATIC ${sources})
  add_library(regather::${name} ALIAS ${target})
  target_include_directories(${target} PUBLIC "$<BUILD_INTERFACE:${root}>" "$<INSTALL_INTERFACE:include/regather>")
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:regather_flags>)
  target_compile_features(${target} PUBLIC cxx_std_20)
  foreach(lower ${ARG_DEPENDS})
    target_link_libraries(${target} PUBLIC regather_${lower})
  endforeach()
  string(REPLACE ";" "," depends "${ARG_DEPENDS}")
  set_property(GLOBAL APPEND_STRING PROPERTY REGATHER_LAYER_TABLE "${name}=${depends}\n")
endfunction()

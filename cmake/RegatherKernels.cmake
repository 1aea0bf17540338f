# tensor/ops/kernels/*.cpp, compiled once per instruction set into a namespace of its own; tensor/ops/kernels.cpp chooses at run
# time. The program itself stays a portable one: only these files may use more than the baseline. Contraction to fused
# multiply-add is wanted here (and nowhere else).
find_package(OpenMP REQUIRED COMPONENTS CXX)
# tensor/ops/parallel.h is for operations of a program of one's own, too.
target_link_libraries(regather_tensor PRIVATE OpenMP::OpenMP_CXX INTERFACE $<INSTALL_INTERFACE:OpenMP::OpenMP_CXX>)

file(GLOB kernel_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tensor/ops/kernels/*.cpp")
# As a property of the files: their options come last, after the -ffp-contract=off of everything else. Tested by kernel_symbols.sh.
set_property(SOURCE ${kernel_sources} APPEND PROPERTY COMPILE_OPTIONS -ffp-contract=fast)
set(kernel_isas baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND kernel_isas avx2 avx512)
  set(flags_avx2 -mavx2 -mfma)
  set(flags_avx512 -mavx512f -mavx512vl -mavx512bw -mavx512dq -mfma)
endif()
foreach(isa ${kernel_isas})
  add_library(regather_kernels_${isa} OBJECT ${kernel_sources})
  target_include_directories(regather_kernels_${isa} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_compile_definitions(regather_kernels_${isa} PRIVATE REGATHER_ISA=${isa})
  target_link_libraries(regather_kernels_${isa} PRIVATE regather_flags)
  target_compile_options(regather_kernels_${isa} PRIVATE -fno-exceptions -fno-rtti -Wno-psabi ${flags_${isa}})
  target_sources(regather_tensor PRIVATE $<TARGET_OBJECTS:regather_kernels_${isa}>)
  string(TOUPPER "${isa}" upper)
  set_property(SOURCE "${PROJECT_SOURCE_DIR}/tensor/ops/kernels.cpp" APPEND PROPERTY COMPILE_DEFINITIONS REGATHER_HAS_${upper})
endforeach()

# Everything else is compiled with the preset's flags; these loops over whole buffers want the vectoriser.
if(NOT REGATHER_SANITIZE)
  foreach(isa ${kernel_isas})
    target_compile_options(regather_kernels_${isa} PRIVATE $<$<NOT:$<CONFIG:Debug>>:-O3>)
  endforeach()
  set_property(SOURCE tensor/device.cpp dist/rank_order_sum.cpp APPEND PROPERTY COMPILE_OPTIONS $<$<NOT:$<CONFIG:Debug>>:-O3>)
endif()

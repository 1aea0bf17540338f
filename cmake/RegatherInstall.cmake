# cmake --install: the program, headers (include/regather/<layer>/...), static libraries, and the package that
# find_package(Regather) reads. A layer's target keeps its name; what the launcher's library offers to others is training.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/Regather")
set(layers tensor dist ckpt model launcher)
foreach(layer ${layers})
  string(REPLACE launcher train name ${layer})
  set_target_properties(regather_${layer} PROPERTIES EXPORT_NAME ${name})
  install(TARGETS regather_${layer} EXPORT Regather ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/${layer}" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/regather" FILES_MATCHING PATTERN "*.h"
          PATTERN "main" EXCLUDE PATTERN "kernels" EXCLUDE PATTERN "cuda" EXCLUDE PATTERN "mpi_*" EXCLUDE PATTERN "gpu_transports.h" EXCLUDE PATTERN "*_parts.h" EXCLUDE)  # of one source's or backend's own
endforeach()
add_library(regather::train ALIAS regather_launcher)
if(REGATHER_CUDA)
  set_target_properties(regather_cuda PROPERTIES EXPORT_NAME cuda)
  set_target_properties(regather_nccl PROPERTIES EXPORT_NAME nccl)
  install(TARGETS regather_cuda regather_nccl EXPORT Regather ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
endif()

install(EXPORT Regather NAMESPACE regather:: FILE RegatherTargets.cmake DESTINATION "${package_dir}")
set(REGATHER_WITH_MPI "${MPI_CXX_FOUND}")
set(REGATHER_WITH_CUDA "${REGATHER_CUDA}")
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/RegatherConfig.cmake.in" "${CMAKE_BINARY_DIR}/RegatherConfig.cmake"
                              INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file("${CMAKE_BINARY_DIR}/RegatherConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_BINARY_DIR}/RegatherConfig.cmake" "${CMAKE_BINARY_DIR}/RegatherConfigVersion.cmake" DESTINATION "${package_dir}")

install(TARGETS regather RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
install(PROGRAMS "${PROJECT_SOURCE_DIR}/tools/mpirun" DESTINATION "${CMAKE_INSTALL_BINDIR}" RENAME regather_mpirun)

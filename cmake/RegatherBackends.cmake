# Backends are files of a layer that need a package of their own: x_<name>.cpp with it, no_x.cpp without it.
if(MPI_CXX_FOUND)
  target_sources(regather_dist PRIVATE "${PROJECT_SOURCE_DIR}/dist/mpi_comm.cpp")
  target_link_libraries(regather_dist PRIVATE MPI::MPI_CXX)
else()
  message(STATUS "MPI not found: building without the mpi backend")
  target_sources(regather_dist PRIVATE "${PROJECT_SOURCE_DIR}/dist/no_mpi.cpp")
endif()

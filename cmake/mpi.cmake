# libqkv_mpi.so, which the library opens at run time where somebody asks for ranks of MPI: so nothing else links MPI.
find_package(MPI QUIET COMPONENTS C)
if(NOT MPI_C_FOUND)
  message(STATUS "No MPI: ranks of context parallelism that are processes need it (Debian: libopenmpi-dev)")
  return()
endif()

add_library(qkv_mpi MODULE src/parallel/mpi/plugin.cpp)
set_target_properties(qkv_mpi PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
target_include_directories(qkv_mpi PRIVATE src)
target_compile_options(qkv_mpi PRIVATE ${warnings})
target_link_libraries(qkv_mpi PRIVATE MPI::MPI_C Threads::Threads)

# Beside the library: there it is looked for first.
if(SKBUILD)
  install(TARGETS qkv_mpi LIBRARY DESTINATION qkv)
else()
  install(TARGETS qkv_mpi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()

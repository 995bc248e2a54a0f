# One Google Benchmark program a file: build/<preset>/bench/<file's name>. They reach inside, as the room tests do.
find_package(benchmark REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(PkgConfig REQUIRED)
pkg_check_modules(OPENBLAS IMPORTED_TARGET openblas)  # the SGEMM that prefill is measured against

file(GLOB bench_sources CONFIGURE_DEPENDS bench/*.cpp)
foreach(source IN LISTS bench_sources)
  get_filename_component(name ${source} NAME_WE)
  add_executable(bench_${name} ${source})
  set_target_properties(bench_${name} PROPERTIES
    OUTPUT_NAME ${name}
    RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bench)
  target_include_directories(bench_${name} PRIVATE src .)
  target_compile_options(bench_${name} PRIVATE -Wall -Wextra)
  target_link_libraries(bench_${name} PRIVATE
    qkv_objects benchmark::benchmark OpenMP::OpenMP_CXX hwy::hwy fmt::fmt)
  if(OPENBLAS_FOUND)
    target_compile_definitions(bench_${name} PRIVATE QKV_HAVE_OPENBLAS)
    target_link_libraries(bench_${name} PRIVATE PkgConfig::OPENBLAS)
  endif()
endforeach()

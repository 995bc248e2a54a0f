# Benchmark suites, one program a file: build/<preset>/bench/<suite>. They reach inside, as the room tests do.
find_package(benchmark REQUIRED)
find_package(CLI11 REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(PkgConfig REQUIRED)
pkg_check_modules(OPENBLAS IMPORTED_TARGET openblas)  # the SGEMM that prefill is measured against

file(GLOB bench_support_sources CONFIGURE_DEPENDS bench/support/*.cpp)
add_library(qkv_bench_support OBJECT ${bench_support_sources})
target_include_directories(qkv_bench_support PUBLIC include src .)
target_compile_options(qkv_bench_support PUBLIC ${warnings})
target_link_libraries(qkv_bench_support PUBLIC
  benchmark::benchmark CLI11::CLI11 nlohmann_json::nlohmann_json OpenMP::OpenMP_CXX fmt::fmt)
if(OPENBLAS_FOUND)
  target_compile_definitions(qkv_bench_support PRIVATE QKV_HAVE_OPENBLAS)
  target_link_libraries(qkv_bench_support PUBLIC PkgConfig::OPENBLAS)
endif()

file(GLOB bench_sources CONFIGURE_DEPENDS bench/*.cpp)
foreach(source IN LISTS bench_sources)
  get_filename_component(name ${source} NAME_WE)
  add_executable(bench_${name} ${source})
  set_target_properties(bench_${name} PROPERTIES
    OUTPUT_NAME ${name}
    RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bench)
  target_link_libraries(bench_${name} PRIVATE qkv_bench_support qkv_objects)
endforeach()

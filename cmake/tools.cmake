# The `qkv` command and the C++ and C examples: users of the shared library that see its public headers only.
file(RELATIVE_PATH bin_to_lib "/${CMAKE_INSTALL_BINDIR}" "/${CMAKE_INSTALL_LIBDIR}")

find_package(CLI11 REQUIRED)
find_package(nlohmann_json REQUIRED)

# All but main: the tests draw their random cases from here too.
file(GLOB tool_sources CONFIGURE_DEPENDS tools/*.cpp tools/*/*.cpp)
list(REMOVE_ITEM tool_sources ${CMAKE_CURRENT_SOURCE_DIR}/tools/main.cpp)
add_library(qkv_tool_objects OBJECT ${tool_sources})
target_include_directories(qkv_tool_objects PUBLIC include tools)
target_compile_options(qkv_tool_objects PRIVATE ${warnings})
target_link_libraries(qkv_tool_objects PUBLIC CLI11::CLI11 nlohmann_json::nlohmann_json fmt::fmt)

add_executable(qkv_tool tools/main.cpp)
set_target_properties(qkv_tool PROPERTIES OUTPUT_NAME qkv INSTALL_RPATH "$ORIGIN/${bin_to_lib}")
target_compile_options(qkv_tool PRIVATE ${warnings})
target_link_libraries(qkv_tool PRIVATE qkv_tool_objects qkv::qkv)

# One program a file: build/<preset>/examples/<file's name>, of C files <file's name>_c.
file(GLOB example_sources CONFIGURE_DEPENDS examples/*.cpp examples/*.c)
foreach(source IN LISTS example_sources)
  get_filename_component(name ${source} NAME_WE)
  if(source MATCHES "[.]c$")
    string(APPEND name _c)
  endif()
  add_executable(example_${name} ${source})
  set_target_properties(example_${name} PROPERTIES
    OUTPUT_NAME ${name}
    RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/examples)
  target_compile_options(example_${name} PRIVATE ${warnings} $<$<COMPILE_LANGUAGE:C>:-pedantic>)
  target_link_libraries(example_${name} PRIVATE qkv::qkv)
endforeach()

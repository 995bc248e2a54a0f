# The extension qkv/_qkv: bindings and the whole library in one file, so that the wheel needs no libqkv.so.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT
  COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind REQUIRED CONFIG)

file(GLOB binding_sources CONFIGURE_DEPENDS python/*.cpp)
nanobind_add_module(_qkv NB_STATIC ${binding_sources})
target_compile_options(_qkv PRIVATE ${warnings})
target_link_libraries(_qkv PRIVATE qkv_objects)

nanobind_add_stub(_qkv_stub
  MODULE _qkv
  OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/_qkv.pyi
  PYTHON_PATH $<TARGET_FILE_DIR:_qkv>
  PATTERN_FILE ${CMAKE_CURRENT_SOURCE_DIR}/python/stub_patterns.txt
  DEPENDS _qkv)

install(TARGETS _qkv LIBRARY DESTINATION qkv)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/_qkv.pyi DESTINATION qkv)

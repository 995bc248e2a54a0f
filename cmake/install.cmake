# Installs the library so that `find_package(qkv)` with `qkv::qkv`, and `pkg-config qkv`, find it.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/qkv)

install(DIRECTORY include/qkv DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h*")
install(TARGETS qkv_shared EXPORT qkvTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET qkv_tool)
  install(TARGETS qkv_tool RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

install(EXPORT qkvTargets NAMESPACE qkv:: DESTINATION ${package_dir})
# The targets need no other package, so their file is already the whole package file.
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/qkvConfig.cmake "include(\${CMAKE_CURRENT_LIST_DIR}/qkvTargets.cmake)\n")
write_basic_package_version_file(qkvConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/qkvConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/qkvConfigVersion.cmake
  DESTINATION ${package_dir})

file(RELATIVE_PATH pkgconfig_to_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
configure_file(cmake/qkv.pc.in qkv.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/qkv.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

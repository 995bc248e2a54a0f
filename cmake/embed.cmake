# Writes OUTPUT: a C++ file with the text of each of FILES (paths below SOURCE_DIR), named as device code includes it.
# Run as  cmake -DOUTPUT=… -DSOURCE_DIR=… -DFILES=a;b -P embed.cmake
set(text "// Generated from src/cuda/device and src/core/index. Do not edit.\n#include \"cuda/device_text.hpp\"\n\nnamespace qkv::cuda {\n\nstd::span<const jit::Header> device_headers() {\n  static constexpr jit::Header kHeaders[] = {\n")
foreach(file IN LISTS FILES)
  file(READ ${SOURCE_DIR}/${file} content)
  string(REGEX REPLACE "^cuda/device/" "" name ${file})
  # Compilers limit the length of one literal; pieces side by side are one.
  string(LENGTH "${content}" length)
  string(APPEND text "      {\"${name}\",\n")
  set(position 0)
  while(position LESS length)
    string(SUBSTRING "${content}" ${position} 8000 piece)
    string(APPEND text "R\"qkv(${piece})qkv\"\n")
    math(EXPR position "${position} + 8000")
  endwhile()
  string(APPEND text "      },\n")
endforeach()
string(APPEND text "  };\n  return kHeaders;\n}\n\n}  // namespace qkv::cuda\n")
file(WRITE ${OUTPUT} "${text}")

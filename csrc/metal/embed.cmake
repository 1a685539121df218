# Flattens the device code into one string: each `#include "..."` is replaced by
# the file it names, once. Run as
#   cmake -DROOT=metal/kernels.metal -DOUTPUT=metal_source.cpp -P embed.cmake
# The output defines `const char* mlx_gguf::metal::source()`, or NAMESPACE's.
cmake_minimum_required(VERSION 3.24)
if(NOT DEFINED NAMESPACE)
  set(NAMESPACE mlx_gguf::metal)
endif()

set(SEEN "")
set(TEXT "")
macro(flatten FILE)
  list(FIND SEEN "${FILE}" KNOWN)
  if(KNOWN EQUAL -1)
    list(APPEND SEEN "${FILE}")
    flatten_body("${FILE}")
  endif()
endmacro()

function(flatten_body FILE)
  get_filename_component(FOLDER "${FILE}" DIRECTORY)
  file(READ "${FILE}" REST)
  string(REPLACE "#pragma once\n" "" REST "${REST}")
  while(REST MATCHES "#include \"([^\"]+)\"\n")
    set(INCLUDED "${CMAKE_MATCH_1}")
    string(FIND "${REST}" "#include \"" AT)
    string(SUBSTRING "${REST}" 0 ${AT} BEFORE)
    string(APPEND TEXT "${BEFORE}")
    string(LENGTH "#include \"${INCLUDED}\"\n" LENGTH)
    math(EXPR AT "${AT} + ${LENGTH}")
    string(SUBSTRING "${REST}" ${AT} -1 REST)
    get_filename_component(INCLUDED "${FOLDER}/${INCLUDED}" ABSOLUTE)
    flatten("${INCLUDED}")
  endwhile()
  string(APPEND TEXT "${REST}")
  set(TEXT "${TEXT}" PARENT_SCOPE)
  set(SEEN "${SEEN}" PARENT_SCOPE)
endfunction()

get_filename_component(ROOT "${ROOT}" ABSOLUTE)
flatten("${ROOT}")

# Compilers limit one literal; adjacent ones are joined.
set(LITERALS "")
string(LENGTH "${TEXT}" LENGTH)
set(AT 0)
while(AT LESS LENGTH)
  string(SUBSTRING "${TEXT}" ${AT} 8000 PART)
  string(APPEND LITERALS "R\"code(${PART})code\"\n")
  math(EXPR AT "${AT} + 8000")
endwhile()
file(WRITE "${OUTPUT}" "// Generated from ${ROOT}.
namespace ${NAMESPACE} {
const char* source();
const char* source() {
  return ${LITERALS};
}
} // namespace ${NAMESPACE}
")

# arm64 macOS 14 from any machine, with the clang and the headers of libc that
# the PyPI package ziglang brings. build.py writes MACOS_TOOLS/{c++,ar,ranlib}.
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES MACOS_TOOLS)
# Linking a program would first build all of a C++ library.
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)

set(CMAKE_CXX_COMPILER ${MACOS_TOOLS}/c++)
set(CMAKE_AR ${MACOS_TOOLS}/ar CACHE FILEPATH "")
set(CMAKE_RANLIB ${MACOS_TOOLS}/ranlib CACHE FILEPATH "")
# Nothing is installed, so no load command is ever rewritten.
set(CMAKE_INSTALL_NAME_TOOL false CACHE FILEPATH "")
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_OSX_SYSROOT "" CACHE STRING "")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)

include_directories(SYSTEM ${CMAKE_CURRENT_LIST_DIR}/include)

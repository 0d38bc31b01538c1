# Options, compiler flags and the two interface targets that carry them:
#   onehop_flags   how our sources are compiled
#   onehop_system  what they need from the C library
# In another project nothing of this may reach it: variables are set in this folder only, cache variables and targets
# are called onehop, and tests, command, examples, installation and Python package are off. tests/install checks it.
option(ONEHOP_WERROR "Make warnings errors (for .ci/run)" OFF)
option(ONEHOP_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(ONEHOP_CLI "Build the command" ${PROJECT_IS_TOP_LEVEL})
option(ONEHOP_EXAMPLES "Build the examples" ${PROJECT_IS_TOP_LEVEL})
option(ONEHOP_INSTALL "Install with the project: libraries, header, command, man page, completion" ${PROJECT_IS_TOP_LEVEL})
set(ONEHOP_CUDA AUTO CACHE STRING "Build the GPU kernels: AUTO (if nvcc works and there is a GPU to build for), ON or OFF")
set(ONEHOP_PYTHON_PACKAGE AUTO CACHE STRING "Build the Python package: AUTO (if there are headers), ON or OFF")
set(ONEHOP_SANITIZE "" CACHE STRING "Empty, address (with undefined behaviour) or thread")
set_property(CACHE ONEHOP_CUDA ONEHOP_PYTHON_PACKAGE PROPERTY STRINGS AUTO ON OFF)
set_property(CACHE ONEHOP_SANITIZE PROPERTY STRINGS "" address thread)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_C_FLAGS_RELEASE "-O3 -g") # assert stays: it guards our own invariants

set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_BUILD_RPATH_USE_ORIGIN ON)

# Libraries and the command lie at the top of the build tree.
if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
  set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
endif()

add_library(onehop_flags INTERFACE)
target_compile_definitions(onehop_flags INTERFACE _GNU_SOURCE)
set(warnings -Wall -Wextra -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wshadow)
if(ONEHOP_WERROR)
  list(APPEND warnings -Werror)
endif()
target_compile_options(onehop_flags INTERFACE "$<$<COMPILE_LANGUAGE:C>:${warnings}>")

# Same bits everywhere: no sum is contracted into an fma unless the source says so.
add_compile_options($<$<COMPILE_LANGUAGE:C>:-ffp-contract=off>)

if(ONEHOP_SANITIZE STREQUAL address)
  set(sanitize -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
elseif(ONEHOP_SANITIZE STREQUAL thread)
  set(sanitize -fsanitize=thread -fno-omit-frame-pointer)
elseif(ONEHOP_SANITIZE)
  message(FATAL_ERROR "ONEHOP_SANITIZE is '${ONEHOP_SANITIZE}': expected address, thread or nothing")
endif()
if(sanitize)
  add_compile_options("$<$<COMPILE_LANGUAGE:C>:${sanitize}>")
  target_compile_definitions(onehop_flags INTERFACE OH_FEW_INSTANCES)
  add_link_options(${sanitize})
endif()

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
add_library(onehop_system INTERFACE)
target_link_libraries(onehop_system INTERFACE Threads::Threads ${CMAKE_DL_LIBS} m)

find_program(ONEHOP_PYTHON python3)
mark_as_advanced(ONEHOP_PYTHON)

# The commit goes into the command's JSON; a change recompiles only the command.
set(ONEHOP_COMMIT unknown)
find_program(ONEHOP_GIT git)
mark_as_advanced(ONEHOP_GIT)
if(ONEHOP_GIT)
  execute_process(
    COMMAND ${ONEHOP_GIT} -C ${CMAKE_CURRENT_SOURCE_DIR} describe --always --dirty --abbrev=12 --exclude=*
    OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET
    RESULT_VARIABLE failed)
  if(NOT failed)
    set(ONEHOP_COMMIT ${commit})
  endif()
endif()

# The NCCL shim: nccl/libnccl.so.2, in a folder of its own, so that nobody finds it by accident, and beside it
# libonehop-nccl.so, a link to it. It carries the library within itself and exports NCCL's names only.
option(ONEHOP_NCCL_SHIM "Build the NCCL shim" ${PROJECT_IS_TOP_LEVEL})
# musl's loader has no such thing, and NCCL none for musl.
include(CheckSymbolExists)
set(CMAKE_REQUIRED_DEFINITIONS -D_GNU_SOURCE)
check_symbol_exists(RTLD_DEEPBIND dlfcn.h ONEHOP_HAVE_DEEPBIND)
mark_as_advanced(ONEHOP_HAVE_DEEPBIND)
unset(CMAKE_REQUIRED_DEFINITIONS)
if(NOT ONEHOP_NCCL_SHIM OR NOT ONEHOP_HAVE_DEEPBIND OR ONEHOP_SANITIZE OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|aarch64|arm64)$")
  return()
endif()

file(GLOB shim_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/nccl_shim/*.c ${PROJECT_SOURCE_DIR}/src/nccl_shim/*.S)
set(shim_map ${PROJECT_SOURCE_DIR}/src/nccl_shim/nccl_shim.map)
set_source_files_properties(${PROJECT_SOURCE_DIR}/src/nccl_shim/nccl_stubs.S PROPERTIES
                            OBJECT_DEPENDS ${PROJECT_SOURCE_DIR}/src/nccl_shim/functions.def)
add_library(onehop_nccl SHARED ${shim_sources} ${objects})
target_include_directories(onehop_nccl PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
target_link_libraries(onehop_nccl PRIVATE onehop_flags onehop_system)
target_link_options(onehop_nccl PRIVATE LINKER:--version-script=${shim_map} LINKER:--as-needed LINKER:-z,defs
                                        LINKER:-z,noexecstack LINKER:-soname,libnccl.so.2)
set_target_properties(onehop_nccl PROPERTIES PREFIX "" SUFFIX "" OUTPUT_NAME libnccl.so.2 NO_SONAME ON
                      LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/nccl LINK_DEPENDS ${shim_map})
add_custom_command(TARGET onehop_nccl POST_BUILD
                   COMMAND ${CMAKE_COMMAND} -E create_symlink libnccl.so.2 $<TARGET_FILE_DIR:onehop_nccl>/libonehop-nccl.so)

if(ONEHOP_INSTALL)
  install(TARGETS onehop_nccl LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/onehop)
  install(FILES ${PROJECT_BINARY_DIR}/nccl/libonehop-nccl.so DESTINATION ${CMAKE_INSTALL_LIBDIR}/onehop)
endif()

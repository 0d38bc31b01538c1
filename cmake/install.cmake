# `cmake --install`: header, both libraries, command, pkg-config file and CMake package.
include(CMakePackageConfigHelpers)

install(FILES include/onehop.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS onehop onehop_static onehop_system EXPORT onehopTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET onehop_cli)
  install(TARGETS onehop_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(FILES packaging/onehop.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
  install(FILES packaging/onehop.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME onehop)
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/onehop)
install(EXPORT onehopTargets NAMESPACE onehop:: DESTINATION ${package_dir})
configure_package_config_file(cmake/onehopConfig.cmake.in onehopConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
# While 0.x, a program runs only with the minor version it was built against.
write_basic_package_version_file(onehopConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/onehopConfig.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/onehopConfigVersion.cmake DESTINATION ${package_dir})

# Paths relative to the file itself, so that the prefix may be moved.
foreach(dir LIBDIR INCLUDEDIR)
  file(RELATIVE_PATH pc_${dir} ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_FULL_${dir}})
endforeach()
file(RELATIVE_PATH pc_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/onehop.pc.in onehop.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/onehop.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

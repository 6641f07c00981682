# The umbrella target strata::core, and `cmake --install`: headers, static libraries and the CMake
# package that find_package(Strata) loads. The Python module installs itself, as component "python".
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

get_property(_layers GLOBAL PROPERTY STRATA_LAYERS)
list(REMOVE_ITEM _layers cli)  # a program's own
set(_core_layers ${_layers})
list(REMOVE_ITEM _core_layers torch)

add_library(strata_core INTERFACE)
add_library(strata::core ALIAS strata_core)
set_target_properties(strata_core PROPERTIES EXPORT_NAME core)
foreach(_layer IN LISTS _core_layers)
  target_link_libraries(strata_core INTERFACE strata_${_layer})
endforeach()

set(_targets strata_core)
foreach(_layer IN LISTS _layers)
  list(APPEND _targets strata_${_layer})
endforeach()

# Builds the files that `cmake --install --component cpp` installs, without tests and the Python module.
add_custom_target(strata_libraries DEPENDS ${_targets} strata_program)

install(TARGETS strata_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT cpp)

install(TARGETS ${_targets} EXPORT StrataTargets COMPONENT cpp
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

set(_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Strata)
install(EXPORT StrataTargets NAMESPACE strata:: DESTINATION ${_package_dir} COMPONENT cpp)
configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/StrataConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/StrataConfig.cmake
  INSTALL_DESTINATION ${_package_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/StrataConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/StrataConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/StrataConfigVersion.cmake
  ${CMAKE_CURRENT_LIST_DIR}/FindStrataTorch.cmake
  ${CMAKE_CURRENT_LIST_DIR}/FindStrataUring.cmake
  DESTINATION ${_package_dir} COMPONENT cpp)

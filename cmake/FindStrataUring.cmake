# Finds liburing: the archive if there is one, so that programs run on machines without the library, else the shared
# library. Gives the target strata_liburing.
find_package(PkgConfig REQUIRED)
pkg_check_modules(URING QUIET liburing)
find_path(StrataUring_INCLUDE_DIR liburing.h HINTS ${URING_INCLUDE_DIRS} NO_CACHE)
find_library(StrataUring_LIBRARY NAMES liburing.a uring HINTS ${URING_LIBRARY_DIRS} NO_CACHE)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(StrataUring
  REQUIRED_VARS StrataUring_LIBRARY StrataUring_INCLUDE_DIR VERSION_VAR URING_VERSION
  REASON_FAILURE_MESSAGE "liburing was not found, or is too old. Install the package liburing-dev.")

if(StrataUring_FOUND AND NOT TARGET strata_liburing)
  add_library(strata_liburing UNKNOWN IMPORTED)
  set_target_properties(strata_liburing PROPERTIES IMPORTED_LOCATION ${StrataUring_LIBRARY})
  target_include_directories(strata_liburing SYSTEM INTERFACE ${StrataUring_INCLUDE_DIR})
  if(StrataUring_LIBRARY MATCHES "\\.a$")  # a module that others load shows none of its functions
    target_link_options(strata_liburing INTERFACE LINKER:--exclude-libs,liburing.a)
  endif()
endif()

# strata_layer(NAME name SOURCES a.cpp ... HEADERS a.h ... DEPENDS layer ... LINK library ...)
# Declares one layer as the object library strata_<name>; DEPENDS names the layers below it, the only
# ones that its files may include (tests/tidy checks the includes themselves).
function(strata_layer)
  cmake_parse_arguments(L "" "NAME" "SOURCES;HEADERS;DEPENDS;LINK" ${ARGN})
  add_library(strata_${L_NAME} STATIC ${L_SOURCES})
  target_sources(strata_${L_NAME} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}/src
                 FILES ${L_HEADERS})
  target_include_directories(strata_${L_NAME} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src> $<INSTALL_INTERFACE:include>)
  target_link_libraries(strata_${L_NAME} PRIVATE $<BUILD_INTERFACE:strata_warnings>)
  foreach(dep IN LISTS L_DEPENDS)
    target_link_libraries(strata_${L_NAME} PUBLIC strata_${dep})
  endforeach()
  if(L_LINK)
    target_link_libraries(strata_${L_NAME} PUBLIC ${L_LINK})
  endif()
  set_property(GLOBAL APPEND PROPERTY STRATA_LAYERS strata_${L_NAME})
endfunction()

# strata_test(NAME name SOURCES a_test.cpp ... LINK target ...): one GoogleTest binary, one ctest entry a case.
function(strata_test)
  cmake_parse_arguments(T "" "NAME;TIMEOUT" "SOURCES;LINK" ${ARGN})
  if(NOT T_TIMEOUT)
    set(T_TIMEOUT 120)
  endif()
  add_executable(${T_NAME} ${T_SOURCES})
  target_link_libraries(${T_NAME} PRIVATE ${T_LINK} strata_warnings GTest::gtest GTest::gmock GTest::gtest_main)
  target_include_directories(${T_NAME} PRIVATE ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR}/src)
  add_test(NAME ${T_NAME} COMMAND ${T_NAME} --gtest_brief=1)
  set_tests_properties(${T_NAME} PROPERTIES TIMEOUT ${T_TIMEOUT} LABELS core)
endfunction()

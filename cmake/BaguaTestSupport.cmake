# SPDX-License-Identifier: Apache-2.0
# What the executables of unit tests and of fuzzing share: sources that are compiled once, and a precompiled header.
add_library(bagua_test_support OBJECT EXCLUDE_FROM_ALL
  tests/fuzz/lone_rank.cpp
  tests/support/device_program.cpp
  tests/support/immediate_steps.cpp
  tests/support/thread_ranks.cpp)
target_link_libraries(bagua_test_support PUBLIC bagua)
# -fPIC instead of CMake's -fPIE for executables: the precompiled headers of the libraries are made with it.
target_compile_options(bagua_test_support PUBLIC -fPIC)
set_target_properties(bagua_test_support PROPERTIES POSITION_INDEPENDENT_CODE OFF)
set(BAGUA_TEST_HEADERS bagua_backend)
if(BAGUA_TESTS_ENABLED)
  set(BAGUA_TEST_HEADERS bagua_test_support)
  # The code under test is optimised, in libbagua; the tests themselves are sooner compiled than run.
  target_compile_options(bagua_test_support PUBLIC -O0)
  target_link_libraries(bagua_test_support PUBLIC GTest::gmock)
  target_precompile_headers(bagua_test_support PRIVATE ${BAGUA_C10D_HEADERS} <gtest/gtest.h> <gmock/gmock.h>)
else()
  target_precompile_headers(bagua_test_support REUSE_FROM bagua_backend)
endif()

# bagua_add_test_executable(<name> <source>...)
function(bagua_add_test_executable name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE bagua_test_support)
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF LINK_DEPENDS_NO_SHARED ON)
  target_precompile_headers(${name} REUSE_FROM ${BAGUA_TEST_HEADERS})
endfunction()

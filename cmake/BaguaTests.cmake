# SPDX-License-Identifier: Apache-2.0
# GoogleTest and how one executable of unit tests is made.
set(BAGUA_TESTS_ENABLED OFF)
find_package(GTest QUIET)
if(NOT TARGET GTest::gmock_main)
  message(WARNING "The C++ unit tests are SKIPPED: GoogleTest with gmock is not installed "
                  "(Debian and Ubuntu: apt-get install libgtest-dev libgmock-dev).")
  return()
endif()
set(BAGUA_TESTS_ENABLED ON)
enable_testing()
include(GoogleTest)
# All executables of tests, and nothing else.
add_custom_target(unit_tests)

function(bagua_build_unit_test name sources labels)
  if(NOT labels)
    set(labels unit)
  endif()
  add_executable(${name} ${sources})
  target_link_libraries(${name} PRIVATE bagua GTest::gmock_main)
  # -fPIC instead of CMake's -fPIE for executables: the precompiled headers of the libraries are made with it.
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF LINK_DEPENDS_NO_SHARED ON)
  target_compile_options(${name} PRIVATE -fPIC)
  target_precompile_headers(${name} REUSE_FROM bagua_backend)
  add_dependencies(unit_tests ${name})
  if(BAGUA_SANITIZE)
    # One process for all: to start one takes libtorch two seconds under a sanitizer.
    add_test(NAME ${name} COMMAND ${name} --gtest_brief=1)
    set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT 900 ENVIRONMENT "OMP_NUM_THREADS=1")
    return()
  endif()
  # Found when the tests run, not when they are linked: a sanitizer or a missing library then fails a test, by name.
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    PROPERTIES LABELS "${labels}" TIMEOUT 120 ENVIRONMENT "OMP_NUM_THREADS=1")
endfunction()

# SPDX-License-Identifier: Apache-2.0
# GoogleTest and how one executable of unit tests is made.
# All executables of tests, and those that are not labelled `long`. There also where GoogleTest is not.
add_custom_target(unit_tests)
add_custom_target(short_unit_tests)
find_package(GTest QUIET)
if(NOT TARGET GTest::gmock_main)
  message(WARNING "The C++ unit tests are SKIPPED: GoogleTest with gmock is not installed "
                  "(Debian and Ubuntu: apt-get install libgtest-dev libgmock-dev).")
  return()
endif()
set(BAGUA_TESTS_ENABLED ON)
enable_testing()
set(BAGUA_TEST_REPORTS ${PROJECT_BINARY_DIR}/reports/units)

# One process for all tests of an executable: to load libtorch takes half a second, under a sanitizer two, and most tests
# a few milliseconds. Which of them ran, and how each ended, is in the report that GoogleTest writes.
function(bagua_build_unit_test name sources labels)
  if(NOT labels)
    set(labels unit)
  endif()
  bagua_add_test_executable(${name} ${sources})
  target_link_libraries(${name} PRIVATE GTest::gmock_main)
  add_dependencies(unit_tests ${name})
  if(NOT long IN_LIST labels)
    add_dependencies(short_unit_tests ${name})
  endif()
  add_test(NAME ${name} COMMAND ${name} --gtest_brief=1)
  set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT 900
    ENVIRONMENT "OMP_NUM_THREADS=1;GTEST_OUTPUT=xml:${BAGUA_TEST_REPORTS}/${name}.xml")
endfunction()

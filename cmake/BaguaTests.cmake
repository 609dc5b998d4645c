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

# bagua_register_test(<name> <executable> LABELS unit ... TIMEOUT seconds [ARGUMENTS ...] [ENVIRONMENT A=1 ...]): runs it
# as one case of CTest, and builds it with the tests that its labels say. CTest alone would not: what nobody built, it
# reports as not run.
function(bagua_register_test name executable)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "TIMEOUT" "LABELS;ARGUMENTS;ENVIRONMENT")
  add_dependencies(unit_tests ${executable})
  if(NOT long IN_LIST arg_LABELS)
    add_dependencies(short_unit_tests ${executable})
  endif()
  add_test(NAME ${name} COMMAND ${executable} ${arg_ARGUMENTS})
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
    ENVIRONMENT "OMP_NUM_THREADS=1;${arg_ENVIRONMENT}")
endfunction()

# One process for all tests of an executable: to load libtorch takes half a second, under a sanitizer two, and most tests
# a few milliseconds. Which of them ran, and how each ended, is in the report that GoogleTest writes.
function(bagua_build_unit_test name sources labels)
  if(NOT labels)
    set(labels unit)
  endif()
  bagua_add_test_executable(${name} ${sources})
  target_link_libraries(${name} PRIVATE GTest::gmock_main)
  bagua_register_test(${name} ${name} LABELS ${labels} TIMEOUT 900 ARGUMENTS --gtest_brief=1
    ENVIRONMENT GTEST_OUTPUT=xml:${BAGUA_TEST_REPORTS}/${name}.xml)
endfunction()

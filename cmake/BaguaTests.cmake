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

# What a sanitizer is not asked about: these are neither run nor among unit_tests.
set(BAGUA_TESTS_LEFT_OUT "")
if(BAGUA_SANITIZE)
  # What hundreds of processes do together, each of their parts does in another test, too.
  list(APPEND BAGUA_TESTS_LEFT_OUT many_ranks)
endif()
if(BAGUA_SANITIZE STREQUAL "thread")
  # Arithmetic of one thread has no races to find. AddressSanitizer sees all of it.
  list(APPEND BAGUA_TESTS_LEFT_OUT arithmetic_test codec_contract_test codec_cuda_contract_test)
endif()

# bagua_register_test(<name> <executable> LABELS unit ... TIMEOUT seconds [ARGUMENTS ...] [ENVIRONMENT A=1 ...]): runs it
# as one case of CTest, and builds it with the tests that its labels say. CTest alone would not: what nobody built, it
# reports as not run.
function(bagua_register_test name executable)
  if(name IN_LIST BAGUA_TESTS_LEFT_OUT)
    return()
  endif()
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
  if(TARGET ${name})
    list(TRANSFORM sources PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
    target_sources(${name} PRIVATE ${sources})
    return()
  endif()
  if(NOT labels)
    set(labels unit)
  endif()
  bagua_add_test_executable(${name} ${sources})
  target_link_libraries(${name} PRIVATE GTest::gmock_main)
  bagua_register_test(${name} ${name} LABELS ${labels} TIMEOUT 900 ARGUMENTS --gtest_brief=1
    ENVIRONMENT GTEST_OUTPUT=xml:${BAGUA_TEST_REPORTS}/${name}.xml)
endfunction()

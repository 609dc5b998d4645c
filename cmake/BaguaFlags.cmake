# SPDX-License-Identifier: Apache-2.0
# Target bagua_flags: what every translation unit of ours is compiled with.
add_library(bagua_flags INTERFACE)
target_include_directories(bagua_flags INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_definitions(bagua_flags INTERFACE BAGUA_WITH_CUDA=$<BOOL:${BAGUA_WITH_CUDA}>)
target_compile_options(bagua_flags INTERFACE -Wall -Wextra -Wnon-virtual-dtor -Woverloaded-virtual
  # GCC's plain -Wshadow also refuses a constructor's parameter with the name of a member; clang's does not.
  $<IF:$<CXX_COMPILER_ID:GNU>,-Wshadow=local,-Wshadow>)
if(BAGUA_WARNINGS_AS_ERRORS)
  target_compile_options(bagua_flags INTERFACE -Werror)
endif()

if(CMAKE_UNITY_BUILD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Several sources in one: what the unnamed namespace of a source holds looks as if a header had it.
  target_compile_options(bagua_flags INTERFACE -Wno-subobject-linkage)
endif()

if(BAGUA_SANITIZE STREQUAL "address")
  set(sanitizers -fsanitize=address,undefined -fno-sanitize-recover=all)
elseif(BAGUA_SANITIZE STREQUAL "thread")
  set(sanitizers -fsanitize=thread)
elseif(BAGUA_SANITIZE STREQUAL "fuzzer")
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "BAGUA_SANITIZE=fuzzer needs clang, whose libFuzzer it uses; this is ${CMAKE_CXX_COMPILER}.")
  endif()
  # Not vptr: libtorch is not built with it.
  set(sanitizers -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all)
  target_compile_options(bagua_flags INTERFACE -fsanitize=fuzzer-no-link)
elseif(BAGUA_SANITIZE)
  message(FATAL_ERROR "BAGUA_SANITIZE is '${BAGUA_SANITIZE}': expected address, thread, fuzzer or nothing.")
endif()
if(BAGUA_SANITIZE)
  # Instrumented, GCC no longer sees that TORCH_CHECK(false) does not return.
  target_compile_options(bagua_flags INTERFACE ${sanitizers} -fno-omit-frame-pointer -Wno-error=return-type)
  target_link_options(bagua_flags INTERFACE ${sanitizers})
else()
  # A sanitizer's runtime comes from the executable, so its symbols are undefined in our library on purpose.
  set(BAGUA_NO_UNDEFINED -Wl,--no-undefined)
endif()

target_link_libraries(bagua_flags INTERFACE torch_wheel::torch)
if(BAGUA_WITH_CUDA)
  target_link_libraries(bagua_flags INTERFACE torch_wheel::cuda)
endif()

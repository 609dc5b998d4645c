# SPDX-License-Identifier: Apache-2.0
# The layers as OBJECT libraries, joined in libbagua. OBJECT and not STATIC: codecs and algorithms register themselves,
# and a linker drops the members of a static library that nobody names.

# One c10d header costs ten seconds of compilation; all layers share this precompiled set. Headers that few sources include
# stay out, as GCC instantiates the templates that the set uses again in every source: comm.hpp and the ProcessGroup.hpp
# that it includes would cost each 0.8 s, reducer.hpp a second.
set(BAGUA_C10D_HEADERS
  <algorithm> <atomic> <chrono> <condition_variable> <cstdint> <functional> <map> <memory> <mutex> <optional> <string>
  <thread> <unordered_map> <utility> <vector>
  <ATen/ATen.h>
  <torch/csrc/distributed/c10d/Backend.hpp>
  <torch/csrc/distributed/c10d/Store.hpp>
  <torch/csrc/distributed/c10d/PrefixStore.hpp>)
if(BAGUA_WITH_CUDA)
  list(APPEND BAGUA_C10D_HEADERS <ATen/cuda/CUDAContext.h> <ATen/cuda/CUDAEvent.h> <c10/cuda/CUDAGuard.h> <nccl.h>)
endif()

function(bagua_declare_libraries)
  foreach(layer kernels backend algorithms)
    add_library(bagua_${layer} OBJECT)
    target_link_libraries(bagua_${layer} PUBLIC bagua_flags)
  endforeach()
  target_precompile_headers(bagua_backend PRIVATE ${BAGUA_C10D_HEADERS})
  target_precompile_headers(bagua_kernels REUSE_FROM bagua_backend)
  target_precompile_headers(bagua_algorithms REUSE_FROM bagua_backend)
  add_library(bagua SHARED)
  target_link_libraries(bagua PUBLIC bagua_flags PRIVATE bagua_kernels bagua_backend bagua_algorithms)
  target_link_options(bagua PRIVATE ${BAGUA_NO_UNDEFINED} -Wl,--as-needed)
  bagua_set_rpath(bagua)
  install(TARGETS bagua LIBRARY DESTINATION bagua)
endfunction()

# Nothing in libbagua depends on Python: the wheels of one torch for several Pythons share it (scripts/wheels.sh).
function(bagua_import_prebuilt_library)
  if(NOT EXISTS "${BAGUA_PREBUILT_LIBRARY}")
    message(FATAL_ERROR "BAGUA_PREBUILT_LIBRARY is '${BAGUA_PREBUILT_LIBRARY}': no such file.")
  elseif(BAGUA_BUILD_TESTS OR BAGUA_BUILD_BENCHMARKS)
    message(FATAL_ERROR "BAGUA_PREBUILT_LIBRARY leaves out the layers that tests and benchmarks need: unset it, or set "
                        "BAGUA_BUILD_TESTS and BAGUA_BUILD_BENCHMARKS to OFF.")
  endif()
  add_library(bagua SHARED IMPORTED GLOBAL)
  set_target_properties(bagua PROPERTIES IMPORTED_LOCATION ${BAGUA_PREBUILT_LIBRARY})
  target_link_libraries(bagua INTERFACE bagua_flags)
  # And what lies beside it: the libraries that are loaded at need.
  cmake_path(GET BAGUA_PREBUILT_LIBRARY PARENT_PATH folder)
  file(GLOB libraries CONFIGURE_DEPENDS ${folder}/lib*.so)
  install(FILES ${libraries} DESTINATION bagua)
endfunction()

# Beside an installed bagua/ lie torch/ and, with CUDA, nvidia/. All of them are loaded by `import torch` before us; the
# run path serves those who load libbagua alone.
function(bagua_set_rpath target)
  set(rpath $ORIGIN $ORIGIN/../torch/lib)
  if(BAGUA_WITH_CUDA)
    list(APPEND rpath $ORIGIN/../nvidia/cu${torch_cuda_major}/lib $ORIGIN/../nvidia/nccl/lib)
  endif()
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "${rpath}")
endfunction()

# bagua_add_sources(<kernels|backend|algorithms> a.cpp ... [CUDA b.cu c.cpp ...])
function(bagua_add_sources layer)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "CUDA")
  set(cuda_sources ${arg_CUDA})
  list(FILTER cuda_sources INCLUDE REGEX "\\.cu$")
  foreach(source IN LISTS cuda_sources)
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} NORMALIZE)
    set_property(GLOBAL APPEND PROPERTY BAGUA_CUDA_SOURCES ${source})
  endforeach()
  set(sources ${arg_UNPARSED_ARGUMENTS})
  if(BAGUA_WITH_CUDA)
    list(APPEND sources ${arg_CUDA})
    list(FILTER sources EXCLUDE REGEX "\\.cu$")
  endif()
  foreach(source IN LISTS sources)
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} NORMALIZE)
    target_sources(bagua_${layer} PRIVATE ${source})
  endforeach()
endfunction()

# bagua_set_simd_flags(<source> <flags...>): a source for one instruction set, chosen at run time. It takes no
# precompiled header, which was made without the flags. Instrumented loops take four times as long to compile at -O3.
function(bagua_set_simd_flags source)
  cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} NORMALIZE)
  if(BAGUA_SANITIZE MATCHES "^(address|thread)$")
    list(APPEND ARGN -O1)
  endif()
  set_source_files_properties(${source} DIRECTORY ${PROJECT_SOURCE_DIR}
    PROPERTIES COMPILE_OPTIONS "${ARGN}" SKIP_PRECOMPILE_HEADERS ON)
endfunction()

# Called once after all layers, in the folder of target bagua: a custom command is known only to targets of its folder.
function(bagua_finish_libraries)
  if(BAGUA_WITH_CUDA)
    get_property(cuda_sources GLOBAL PROPERTY BAGUA_CUDA_SOURCES)
    foreach(source IN LISTS cuda_sources)
      bagua_compile_cuda(${source} object)
      target_sources(bagua PRIVATE ${object})
    endforeach()
  endif()
  foreach(layer kernels backend algorithms)
    get_target_property(sources bagua_${layer} SOURCES)
    if(NOT sources)
      message(FATAL_ERROR "Layer ${layer}/ has no source: bagua_add_sources(${layer} ...) was never called.")
    endif()
  endforeach()
endfunction()

# A test that nobody builds passes for ever.
function(bagua_check_every_test_is_built)
  file(GLOB_RECURSE found CONFIGURE_DEPENDS
    kernels/*_test.cpp backend/*_test.cpp algorithms/*_test.cpp python_shim/*_test.cpp tests/*_test.cpp)
  get_property(built GLOBAL PROPERTY BAGUA_TEST_SOURCES)
  list(REMOVE_ITEM found ${built} "")
  if(found)
    list(JOIN found "\n  " listing)
    message(FATAL_ERROR "No bagua_add_unit_test() names these tests:\n  ${listing}")
  endif()
endfunction()

# bagua_add_unit_test(<name> SOURCES x_test.cpp ... [LABELS unit] [NEEDS target]): a GoogleTest executable over libbagua,
# left out where a target that it needs was not made. Folders whose tests take a moment name the same one, which lies in the
# first folder: GCC takes five seconds for an executable of its own.
function(bagua_add_unit_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "NEEDS" "SOURCES;LABELS")
  foreach(source IN LISTS arg_SOURCES)
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} NORMALIZE)
    set_property(GLOBAL APPEND PROPERTY BAGUA_TEST_SOURCES ${source})
  endforeach()
  if(BAGUA_TESTS_ENABLED AND (NOT arg_NEEDS OR TARGET ${arg_NEEDS}))
    bagua_build_unit_test(${name} "${arg_SOURCES}" "${arg_LABELS}")
  endif()
endfunction()

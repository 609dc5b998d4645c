# SPDX-License-Identifier: Apache-2.0
# The torch that Python imports, as imported targets. torch's own CMake package is not used: with a CUDA torch it
# insists on a complete local toolkit of its own version even for a project that compiles no CUDA.
#
#   torch_wheel::torch    libtorch, libtorch_cpu, libc10 and their headers
#   torch_wheel::python   the above, libtorch_python and the bundled pybind11
#   torch_wheel::cuda     libtorch_cuda, libc10_cuda, and the libcudart and libnccl that this torch loads
#   TORCH_WHEEL_{VERSION,MINOR,ROOT,CUDA_VERSION,CXX11_ABI,NCCL_VERSION}   CUDA_VERSION is empty without CUDA
execute_process(
  COMMAND ${CMAKE_COMMAND} -E env TORCH_DEVICE_BACKEND_AUTOLOAD=0 ${Python_EXECUTABLE} -I
          ${CMAKE_CURRENT_LIST_DIR}/probe_torch.py
  OUTPUT_VARIABLE probe_output
  ERROR_VARIABLE probe_error
  RESULT_VARIABLE probe_status)
if(NOT probe_status EQUAL 0)
  message(FATAL_ERROR "${Python_EXECUTABLE} cannot import torch: install torch first (make setup does). ${probe_error}")
endif()
foreach(key version cuda_version cxx11_abi root cudart cuda_include nccl nccl_include nccl_version)
  string(TOUPPER ${key} upper)
  string(JSON TORCH_WHEEL_${upper} GET "${probe_output}" ${key})
endforeach()
string(REGEX MATCH "^[0-9]+\\.[0-9]+" TORCH_WHEEL_MINOR ${TORCH_WHEEL_VERSION})
# Another torch in the same environment must configure again.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${TORCH_WHEEL_ROOT}/version.py)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TorchWheel REQUIRED_VARS TORCH_WHEEL_ROOT VERSION_VAR TORCH_WHEEL_VERSION)
if(TORCH_WHEEL_MINOR VERSION_LESS 2.11 OR TORCH_WHEEL_MINOR VERSION_GREATER 2.15)
  message(FATAL_ERROR "torch ${TORCH_WHEEL_VERSION} is not supported: bagua builds with torch 2.11 to 2.15.")
endif()

set(torch_lib ${TORCH_WHEEL_ROOT}/lib)
function(import_torch_library name)
  add_library(torch_wheel::lib${name} SHARED IMPORTED)
  set_target_properties(torch_wheel::lib${name} PROPERTIES IMPORTED_LOCATION ${torch_lib}/lib${name}.so)
endfunction()

import_torch_library(torch_cpu)
import_torch_library(torch)
import_torch_library(c10)
import_torch_library(torch_python)

add_library(torch_wheel::torch INTERFACE IMPORTED)
target_include_directories(torch_wheel::torch SYSTEM INTERFACE
  ${TORCH_WHEEL_ROOT}/include ${TORCH_WHEEL_ROOT}/include/torch/csrc/api/include)
# What torch's own CMake package defines for its users and its headers test, members of classes among it.
target_compile_definitions(torch_wheel::torch INTERFACE
  _GLIBCXX_USE_CXX11_ABI=${TORCH_WHEEL_CXX11_ABI} USE_DISTRIBUTED USE_RPC)
target_link_libraries(torch_wheel::torch INTERFACE
  torch_wheel::libtorch torch_wheel::libtorch_cpu torch_wheel::libc10)

add_library(torch_wheel::python INTERFACE IMPORTED)
target_link_libraries(torch_wheel::python INTERFACE torch_wheel::torch torch_wheel::libtorch_python)

if(TORCH_WHEEL_CUDA_VERSION AND NOT BAGUA_CUDA STREQUAL "OFF")
  if(NOT TORCH_WHEEL_CUDART OR NOT TORCH_WHEEL_NCCL OR NOT TORCH_WHEEL_NCCL_INCLUDE)
    message(FATAL_ERROR "torch ${TORCH_WHEEL_VERSION} has CUDA, but its libcudart ('${TORCH_WHEEL_CUDART}') or libnccl "
                        "('${TORCH_WHEEL_NCCL}') was not found beside it; -DBAGUA_CUDA=OFF builds without CUDA.")
  endif()
  import_torch_library(torch_cuda)
  import_torch_library(c10_cuda)
  # By path and not by a toolkit's stub: one libcudart and one libnccl live in the process, those torch loads.
  foreach(name cudart nccl)
    string(TOUPPER ${name} upper)
    add_library(torch_wheel::lib${name} SHARED IMPORTED)
    set_target_properties(torch_wheel::lib${name} PROPERTIES IMPORTED_LOCATION ${TORCH_WHEEL_${upper}})
  endforeach()
  add_library(torch_wheel::cuda INTERFACE IMPORTED)
  target_include_directories(torch_wheel::cuda SYSTEM INTERFACE ${TORCH_WHEEL_NCCL_INCLUDE})
  target_link_libraries(torch_wheel::cuda INTERFACE torch_wheel::torch torch_wheel::libtorch_cuda
    torch_wheel::libc10_cuda torch_wheel::libnccl torch_wheel::libcudart)
endif()

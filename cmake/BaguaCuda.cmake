# SPDX-License-Identifier: Apache-2.0
# Decides BAGUA_WITH_CUDA, finds nvcc, and offers bagua_compile_cuda(). nvcc is called by rules of our own: CMake's CUDA
# language links test programs, which the toolkit's wheels (no lib64, no stubs) do not allow.
set(BAGUA_WITH_CUDA OFF)
if(BAGUA_CUDA STREQUAL "OFF")
  message(STATUS "CUDA: off, as asked")
  return()
elseif(NOT TORCH_WHEEL_CUDA_VERSION)
  if(BAGUA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "BAGUA_CUDA=ON, but torch ${TORCH_WHEEL_VERSION} was built without CUDA.")
  endif()
  message(STATUS "CUDA: off, torch ${TORCH_WHEEL_VERSION} has none")
  return()
endif()
set(BAGUA_WITH_CUDA ON)
string(REGEX MATCH "^[0-9]+" torch_cuda_major ${TORCH_WHEEL_CUDA_VERSION})
set(BAGUA_CUDA_WHEELS_DIR ${PROJECT_BINARY_DIR}/cuda-toolkit CACHE PATH "Where the toolkit's wheels are unpacked")

# Sets ${out} to nvcc's release (13.0), or to nothing where the nvcc does not run or is of another major than torch.
function(bagua_nvcc_release nvcc out)
  set(${out} "" PARENT_SCOPE)
  if(NOT EXISTS "${nvcc}")
    return()
  endif()
  execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE banner ERROR_QUIET)
  if(banner MATCHES "release ([0-9]+)\\.([0-9]+)" AND CMAKE_MATCH_1 EQUAL torch_cuda_major)
    set(${out} ${CMAKE_MATCH_1}.${CMAKE_MATCH_2} PARENT_SCOPE)
  endif()
endfunction()

function(bagua_find_machine_nvcc out)
  find_program(BAGUA_MACHINE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda /opt/cuda
    /usr/local/cuda-${torch_cuda_major} PATH_SUFFIXES bin)
  set(${out} "" PARENT_SCOPE)
  bagua_nvcc_release("${BAGUA_MACHINE_NVCC}" release)
  if(release)
    set(${out} ${BAGUA_MACHINE_NVCC} PARENT_SCOPE)
  elseif(BAGUA_MACHINE_NVCC)
    message(STATUS "CUDA: ${BAGUA_MACHINE_NVCC} is not of CUDA ${torch_cuda_major}, which torch was built with")
  endif()
endfunction()

function(bagua_find_wheel_nvcc out)
  set(requirements ${PROJECT_SOURCE_DIR}/cmake/cuda-toolkit-${torch_cuda_major}.txt)
  set(root ${BAGUA_CUDA_WHEELS_DIR}/nvidia/cu${torch_cuda_major})
  if(NOT EXISTS ${requirements})
    message(FATAL_ERROR "torch ${TORCH_WHEEL_VERSION} has CUDA ${TORCH_WHEEL_CUDA_VERSION}, and neither the machine nor "
                        "this project brings an nvcc for it; -DBAGUA_CUDA=OFF builds without CUDA.")
  endif()
  if(NOT EXISTS ${BAGUA_CUDA_WHEELS_DIR}/.complete)
    message(STATUS "CUDA: installing the toolkit's wheels into ${BAGUA_CUDA_WHEELS_DIR}")
    cmake_path(GET Python_EXECUTABLE PARENT_PATH python_bin)
    find_program(BAGUA_UV uv HINTS ${python_bin})
    if(BAGUA_UV)
      set(installer ${BAGUA_UV} pip install --python ${Python_EXECUTABLE})
    else()
      set(installer ${Python_EXECUTABLE} -m pip install)
    endif()
    execute_process(
      COMMAND ${installer} --quiet --no-deps --upgrade --target ${BAGUA_CUDA_WHEELS_DIR} -r ${requirements}
      RESULT_VARIABLE status)
    if(NOT status EQUAL 0)
      message(FATAL_ERROR "torch ${TORCH_WHEEL_VERSION} has CUDA, the machine has no nvcc of CUDA ${torch_cuda_major}, and "
                          "its wheels could not be installed; -DBAGUA_CUDA=OFF builds without CUDA.")
    endif()
    file(TOUCH ${BAGUA_CUDA_WHEELS_DIR}/.complete)
  endif()
  set(${out} ${root}/bin/nvcc PARENT_SCOPE)
endfunction()

set(BAGUA_NVCC "")
if(BAGUA_CUDA_TOOLKIT STREQUAL "auto" OR BAGUA_CUDA_TOOLKIT STREQUAL "machine")
  bagua_find_machine_nvcc(BAGUA_NVCC)
elseif(NOT BAGUA_CUDA_TOOLKIT STREQUAL "wheels")
  set(BAGUA_NVCC ${BAGUA_CUDA_TOOLKIT}/bin/nvcc)
endif()
if(NOT BAGUA_NVCC AND (BAGUA_CUDA_TOOLKIT STREQUAL "auto" OR BAGUA_CUDA_TOOLKIT STREQUAL "wheels"))
  bagua_find_wheel_nvcc(BAGUA_NVCC)
endif()
bagua_nvcc_release("${BAGUA_NVCC}" BAGUA_NVCC_RELEASE)
if(NOT BAGUA_NVCC_RELEASE)
  message(FATAL_ERROR "No nvcc of CUDA ${torch_cuda_major} with BAGUA_CUDA_TOOLKIT=${BAGUA_CUDA_TOOLKIT} (tried "
                      "'${BAGUA_NVCC}'); -DBAGUA_CUDA=OFF builds without CUDA.")
endif()
file(REAL_PATH ${BAGUA_NVCC} nvcc_path)
cmake_path(GET nvcc_path PARENT_PATH nvcc_bin)
cmake_path(GET nvcc_bin PARENT_PATH BAGUA_CUDA_ROOT)
message(STATUS "CUDA: nvcc ${BAGUA_NVCC_RELEASE} (${BAGUA_NVCC}), torch's CUDA ${TORCH_WHEEL_CUDA_VERSION}, "
               "NCCL ${TORCH_WHEEL_NCCL_VERSION}")

# The toolkit's headers, and behind them those of torch's wheels: the wheels of nvcc lack cublas and cusparse, which
# ATen/cuda/CUDAContext.h includes; torch's lack crt/, which every runtime header includes.
set(BAGUA_CUDA_INCLUDES "")
foreach(dir ${BAGUA_CUDA_ROOT}/include ${TORCH_WHEEL_CUDA_INCLUDE})
  if(EXISTS ${dir})
    list(APPEND BAGUA_CUDA_INCLUDES ${dir})
  endif()
endforeach()
target_include_directories(torch_wheel::cuda SYSTEM INTERFACE ${BAGUA_CUDA_INCLUDES})

set(nvcc_archs "")
foreach(arch IN LISTS BAGUA_CUDA_ARCHS)
  list(APPEND nvcc_archs -gencode=arch=compute_${arch},code=sm_${arch})
endforeach()
list(GET BAGUA_CUDA_ARCHS -1 arch)
list(APPEND nvcc_archs -gencode=arch=compute_${arch},code=compute_${arch})

set(nvcc_host_flags -fPIC,-Wall,-Wextra)
if(CMAKE_BUILD_TYPE STREQUAL "Debug")
  set(nvcc_optimise -O0 -g -lineinfo)
else()
  set(nvcc_optimise -O3 -DNDEBUG -lineinfo)
endif()
if(BAGUA_WARNINGS_AS_ERRORS)
  list(APPEND nvcc_optimise --Werror=all-warnings)
endif()
set(nvcc_includes -I${PROJECT_SOURCE_DIR})
if(CMAKE_SYSROOT)
  list(APPEND nvcc_includes -Xcompiler=--sysroot=${CMAKE_SYSROOT})
endif()
foreach(dir ${TORCH_WHEEL_ROOT}/include ${TORCH_WHEEL_ROOT}/include/torch/csrc/api/include ${BAGUA_CUDA_ROOT}/include/cccl
            ${BAGUA_CUDA_INCLUDES} ${TORCH_WHEEL_NCCL_INCLUDE})
  if(EXISTS ${dir})
    list(APPEND nvcc_includes -isystem=${dir})
  endif()
endforeach()

# Sets ${out} to the object file that nvcc makes of the source.
function(bagua_compile_cuda source out)
  cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE relative)
  set(object ${PROJECT_BINARY_DIR}/cuda/${relative}.o)
  cmake_path(GET object PARENT_PATH directory)
  file(MAKE_DIRECTORY ${directory})
  add_custom_command(
    OUTPUT ${object}
    COMMAND ${BAGUA_NVCC} -c ${source} -o ${object} -MD -MF ${object}.d -std=c++20 ${nvcc_archs} ${nvcc_optimise}
            -ccbin ${CMAKE_CXX_COMPILER} -Xcompiler=${nvcc_host_flags} --expt-relaxed-constexpr --extended-lambda
            -Xcudafe=--diag_suppress=20012 -DBAGUA_WITH_CUDA=1 -D_GLIBCXX_USE_CXX11_ABI=${TORCH_WHEEL_CXX11_ABI}
            ${nvcc_includes}
    DEPENDS ${source}
    DEPFILE ${object}.d
    COMMENT "Compiling CUDA source ${relative}"
    VERBATIM)
  set(${out} ${object} PARENT_SCOPE)
endfunction()

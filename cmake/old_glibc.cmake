# SPDX-License-Identifier: Apache-2.0
# A toolchain file: what this machine's GCC builds with it runs from glibc 2.28 on, as torch's own wheels do, whose tag is
# manylinux_2_28. OLD_GLIBC_SYSROOT (of the environment) is the folder that scripts/sysroot.sh has filled: glibc and libstdc++
# are linked as they are there, so that a symbol which they lack fails the build.
if(NOT EXISTS "$ENV{OLD_GLIBC_SYSROOT}/.complete")
  message(FATAL_ERROR "OLD_GLIBC_SYSROOT is '$ENV{OLD_GLIBC_SYSROOT}': expected the folder that scripts/sysroot.sh has filled.")
endif()
set(CMAKE_SYSROOT $ENV{OLD_GLIBC_SYSROOT})
set(triple x86_64-linux-gnu)
# GCC looks for start files and libraries in the folders beside its own before those of the sysroot.
set(CMAKE_CXX_FLAGS_INIT "-B ${CMAKE_SYSROOT}/usr/lib/${triple}")
foreach(kind EXE SHARED MODULE)
  set(CMAKE_${kind}_LINKER_FLAGS_INIT
    "-L${CMAKE_SYSROOT}/usr/lib/${triple} -L${CMAKE_SYSROOT}/lib/${triple} -L${CMAKE_SYSROOT}/usr/lib/gcc/${triple}/10")
endforeach()
# Before glibc's libraries, which were apart until 2.34, what those lack.
set(CMAKE_CXX_STANDARD_LIBRARIES "-lold_glibc -lpthread -ldl -lrt")

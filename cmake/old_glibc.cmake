# SPDX-License-Identifier: Apache-2.0
# A toolchain file: what this machine's GCC builds with it runs from glibc 2.28 on, as torch's own wheels do, whose tag is
# manylinux_2_28. OLD_GLIBC_SYSROOT (of the environment) is the folder that scripts/sysroot.sh has filled, and whose glibc
# and libstdc++ are linked. What these lack of newer libstdc++s is in old_glibc.cpp, or torch's libraries bring it, which
# scripts/wheels.sh checks; else the build fails.
set(CMAKE_SYSROOT $ENV{OLD_GLIBC_SYSROOT})
if(NOT EXISTS "${CMAKE_SYSROOT}/old_glibc.o")
  message(FATAL_ERROR "OLD_GLIBC_SYSROOT is '${CMAKE_SYSROOT}': expected the folder that scripts/sysroot.sh has filled.")
endif()
set(triple x86_64-linux-gnu)
# GCC looks for start files and libraries in the folders beside its own before those of the sysroot.
set(CMAKE_CXX_FLAGS_INIT "-B \"${CMAKE_SYSROOT}/usr/lib/${triple}\"")
set(flags "\"${CMAKE_SYSROOT}/old_glibc.o\"")
foreach(folder usr/lib/${triple} lib/${triple} usr/lib/gcc/${triple}/10)
  string(APPEND flags " -L\"${CMAKE_SYSROOT}/${folder}\"")
endforeach()
foreach(kind EXE SHARED MODULE)
  set(CMAKE_${kind}_LINKER_FLAGS_INIT ${flags})
endforeach()
# glibc had these apart until 2.34.
set(CMAKE_CXX_STANDARD_LIBRARIES "-lpthread -ldl -lrt")

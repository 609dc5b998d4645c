// SPDX-License-Identifier: Apache-2.0
#include "kernels/processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace bagua {

#if defined(__x86_64__)

namespace {

// clang 16 does not know it in __builtin_cpu_supports.
bool hasF16C() {
  unsigned int eax = 0;
  unsigned int ebx = 0;
  unsigned int ecx = 0;
  unsigned int edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

}  // namespace

bool hasAvx2() { return __builtin_cpu_supports("avx2") && hasF16C(); }

bool hasAvx512() {
  return hasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#else

bool hasAvx2() { return false; }
bool hasAvx512() { return false; }

#endif

}  // namespace bagua

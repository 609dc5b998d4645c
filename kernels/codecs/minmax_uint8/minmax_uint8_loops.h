// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/codecs/minmax_uint8/minmax_uint8_cpu.h"

namespace bagua::minmax_uint8::cpu {

// Plain C++, for every processor, and the reference for the others.
const Loops& scalarLoops();

#if defined(__x86_64__)
const Loops& avx2Loops();
const Loops& avx512Loops();
#endif

}  // namespace bagua::minmax_uint8::cpu

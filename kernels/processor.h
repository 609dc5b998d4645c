// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which loops this processor can run, for the choice at run time. Those of kernels/ need more of an instruction set
// than its name says.
namespace bagua {

// With F16C, by which half floats are read and written.
bool hasAvx2();
// hasAvx2(), and the parts F, BW, DQ and VL of AVX-512.
bool hasAvx512();

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace bagua::low_rank {

// Makes the vectors of each set orthonormal, in place, by Gram-Schmidt in float64 with a second projection, which keeps
// them orthogonal however close together they lay. `vectors` is (sets, vectors of a set, elements), float32 or float64
// and contiguous; a set has at most as many vectors as elements.
//
// A vector that is zero, or that those before it make up to the last bit, becomes zero: it spans nothing. A NaN or an
// infinity makes its vector NaN, and those after it. On the CPU the bits are the same on every processor and for any
// number of sets; on CUDA nothing waits for the device.
void orthogonalize(at::Tensor& vectors);

}  // namespace bagua::low_rank

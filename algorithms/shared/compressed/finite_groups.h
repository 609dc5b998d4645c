// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/codec.h"

namespace bagua::compressed {

// Whether decoded values are all finite. One of each group is looked at: where a value of a group was not finite, all
// of that group decode to NaN (see Codec). `values` is of a chunk, on the CPU; `piece` begins where a group begins.
bool areGroupsFinite(const at::Tensor& values, const Piece& piece, int64_t groupElements);

}  // namespace bagua::compressed

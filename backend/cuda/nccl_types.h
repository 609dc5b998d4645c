// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <nccl.h>

#include "backend/torch_compat.h"

namespace bagua {

// How NCCL is to reduce tensors of a dtype.
struct NcclReduction {
  ncclDataType_t dtype;
  // 2 for complex numbers, which NCCL takes as pairs of reals.
  int64_t valuesPerElement = 1;
  // Not set for PREMUL_SUM, whose operation is made for the call.
  ncclRedOp_t op = ncclSum;
  bool isPreMulSum = false;
};

// What NCCL cannot do is a TypeError or a ValueError that names the dtype and the operation.
NcclReduction ncclReductionFor(const c10d::ReduceOp& op, at::ScalarType dtype);

}  // namespace bagua

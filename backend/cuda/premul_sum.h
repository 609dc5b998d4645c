// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <nccl.h>

#include <array>
#include <cstddef>

#include "backend/torch_compat.h"

namespace bagua {

// The factor of a PREMUL_SUM, in the dtype and the place that NCCL reads it from. One on the CPU is read when the
// operation is made. One on the device is read when the reduction runs: the program holds the original, and a converted
// copy is of the communication stream's memory, which only later work on that stream can take over.
class PreMulFactor {
 public:
  PreMulFactor(const c10d::ReduceOp& op, ncclDataType_t dtype, at::Device device);

  [[nodiscard]] void* data();
  [[nodiscard]] ncclScalarResidence_t residence() const;

 private:
  at::Tensor onDevice_;
  alignas(double) std::array<std::byte, sizeof(double)> onHost_{};
};

}  // namespace bagua

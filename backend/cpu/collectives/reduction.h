// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "backend/process_group/argument_checks.h"

namespace bagua::reduction {

// Throws unless `op` has a meaning for `dtype`: no bitwise operation on floating-point or complex numbers, no order on
// complex numbers, no mean of bools.
void checkSupported(const ArgumentChecks& checks, const c10d::ReduceOp& op, at::ScalarType dtype);

// What a rank contributes: `input` itself, or for PREMUL_SUM a scaled copy.
at::Tensor prepare(const at::Tensor& input, const c10d::ReduceOp& op);

// `output`, a dense CPU tensor, becomes the reduction of contributions of as many elements: `parts[i]` is where the
// i-th begins, and may be `output` itself. They are combined in rank order; half and bfloat16 are accumulated in float
// and rounded once. AVG divides by `contributors`, as a part may be the sum of several, and truncates integers, whose
// sum wraps as NCCL's does. SUM and MAX of bools are "or", PRODUCT and MIN are "and". A NaN wins in MIN and MAX.
void reduceParts(const std::vector<const void*>& parts, const c10d::ReduceOp& op, int64_t contributors,
                 const at::Tensor& output);

// A run of elements. A view that torch makes takes 0.7 us, as long as ranks take to meet in shared memory.
struct Elements {
  at::ScalarType dtype = at::ScalarType::Undefined;
  int64_t numel = 0;
  uint8_t* data = nullptr;

  [[nodiscard]] int64_t itemSize() const { return static_cast<int64_t>(c10::elementSize(dtype)); }
  [[nodiscard]] int64_t bytes() const { return numel * itemSize(); }
  [[nodiscard]] Elements part(int64_t begin, int64_t length) const {
    return {dtype, length, data + begin * itemSize()};
  }
};
Elements elementsOf(const at::Tensor& tensor);
void reduceParts(const std::vector<const void*>& parts, const c10d::ReduceOp& op, int64_t contributors,
                 const Elements& output);

// 16-bit floats as those in which they are accumulated; everything else as it is. And the size of such an element.
at::Tensor widened(const at::Tensor& flat);
int64_t wideItemSize(const at::Tensor& flat);

// Up to so many contributions of hosts are combined one after the other; more of them half by half (see Halves), so
// that hosts may reduce them in rounds, with the same result.
inline constexpr int kMostInOrder = 8;
// The contributions of hosts, in their order.
void reduceHosts(const std::vector<const void*>& parts, const c10d::ReduceOp& op, int64_t contributors,
                 const at::Tensor& output);
// Of some halves of halves, in order, as many as a power of two: neighbours are combined, and again, until one is left.
// Null where a half is empty.
void reduceHalves(const std::vector<const void*>& parts, const c10d::ReduceOp& op, int64_t contributors,
                  const at::Tensor& output);

// How a reduction is done in two steps, the first of which leaves partial results of the tensor's own dtype.
struct TwoSteps {
  c10d::ReduceOp first;
  c10d::ReduceOp second;
};
// A mean of 16-bit floats is divided in the first step, for their sum could overflow; others in the second.
TwoSteps inTwoSteps(const c10d::ReduceOp& op, at::ScalarType dtype);

}  // namespace bagua::reduction

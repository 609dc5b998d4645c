// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "backend/stage_clock.h"

namespace bagua {

// A few float32 numbers of a program, for a later step to read: the CPU does not wait for the device that makes them.
class GuardNumbers {
 public:
  // On the thread and stream of the program.
  explicit GuardNumbers(const at::Tensor& numbers);

  // Whether haveCome() will tell: a program that no clock times knows nothing of its device.
  [[nodiscard]] bool tellWhenTheyCome() const { return !copy_.defined() || end_; }
  // Whether values() waits for nothing.
  [[nodiscard]] bool haveCome() const;
  // On the CPU.
  [[nodiscard]] at::Tensor values() const;

 private:
  at::Tensor made_;
  // The copy that is under way, and when it has ended.
  at::Tensor copy_;
  std::optional<Moment> end_;
};

// Sums of squares that have the same bits on every machine: each rank sums by itself what it bases a verdict on.
double squaredNorm(const float* values, int64_t count);
double squaredDistance(const float* values, const float* others, int64_t count);

}  // namespace bagua

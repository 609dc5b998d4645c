// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/guard/guard_numbers.h"

#include <ATen/ops/empty.h>

#include "kernels/device_ways.h"

namespace bagua {
namespace {

// Each square is exact in float64, so that it does not matter whether the compiler fuses it with the sum, whose order
// is that of the numbers.
template <typename ValueAt>
double sumOfSquares(int64_t count, ValueAt&& valueAt) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float value = valueAt(i);
    sum += static_cast<double>(value) * static_cast<double>(value);
  }
  return sum;
}

}  // namespace

GuardNumbers::GuardNumbers(const at::Tensor& numbers) : made_(numbers.to(at::kFloat)) {
  if (worksOnCpu(made_)) return;
  const auto pinned = at::TensorOptions().dtype(at::kFloat).pinned_memory(made_.is_cuda());
  copy_ = at::empty(made_.sizes(), pinned).copy_(made_, /*non_blocking=*/true);
  end_ = StageClock::current().now();
}

bool GuardNumbers::haveCome() const { return !copy_.defined() || (end_ && end_->hasCome()); }

at::Tensor GuardNumbers::values() const {
  if (copy_.defined() && haveCome()) return copy_;
  return made_.cpu();
}

double squaredNorm(const float* values, int64_t count) {
  return sumOfSquares(count, [values](int64_t i) { return values[i]; });
}

double squaredDistance(const float* values, const float* others, int64_t count) {
  return sumOfSquares(count, [values, others](int64_t i) { return values[i] - others[i]; });
}

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/guard/guard_numbers.h"

#include <ATen/ops/empty.h>

#include "kernels/device_ways.h"

namespace bagua {

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

}  // namespace bagua

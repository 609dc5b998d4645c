// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace bagua {

// While it lives, this thread is in the state that a program with these results runs in, on whichever thread: without
// gradients, without the caller's autocast, which would have it multiply in 16 bits, and in inference mode if it writes
// to inference tensors, which torch lets nobody change outside of that mode. What else the program makes is of the same
// kind on the caller's thread as on the executor's own.
class ProgramMode {
 public:
  explicit ProgramMode(const std::vector<at::Tensor>& results) {
    const bool isNeeded = std::ranges::any_of(results, [](const at::Tensor& result) { return result.is_inference(); });
    if (isNeeded != c10::InferenceMode::is_enabled()) inferenceMode_.emplace(isNeeded);
    noGrad_.emplace();
  }

 private:
  // It stands before the mode, which restores at its end what it found.
  const c10::impl::ExcludeDispatchKeyGuard noAutocast_{c10::autocast_dispatch_keyset};
  std::optional<c10::InferenceMode> inferenceMode_;
  // After the mode, which sets it too; gone before it.
  std::optional<at::NoGradGuard> noGrad_;
};

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace bagua {

// The gradients of a model as a backward has left them. Whoever skips the optimizer's step drops them or sets them to
// zero; that is how a skipped step is found.
class GradientsLeft {
 public:
  explicit GradientsLeft(const std::vector<at::Tensor>& parameters) : parameters_(parameters) {}

  // A backward has ended.
  void note() { marks_ = marks(); }
  // Whether none is left of what it made. It may have left zeros: those that nobody has touched are not gone. Waits for
  // a CUDA device.
  [[nodiscard]] bool haveGone() const;
  // Waits for a CUDA device, too.
  [[nodiscard]] bool areFinite() const;

 private:
  // Others after any change of a gradient.
  using Marks = std::vector<std::pair<const void*, uint32_t>>;
  [[nodiscard]] Marks marks() const;

  const std::vector<at::Tensor> parameters_;
  Marks marks_;
};

}  // namespace bagua

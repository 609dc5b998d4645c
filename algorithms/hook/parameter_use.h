// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace bagua {

// Which parameters backwards have used, for DDP models with find_unused_parameters or static_graph: those DDP shows the
// optimizer no gradient of what no rank has used. It tells a parameter as used where DDP itself does.
class ParameterUse {
 public:
  // From now on. Between two backwards.
  explicit ParameterUse(const std::vector<at::Tensor>& parameters);

  // Whether a backward has used it since the last call. As its gradient is handed over.
  bool take(int64_t position);

 private:
  // Shared with hooks of the autograd graph, which outlast this.
  using Flags = std::vector<std::atomic<bool>>;

  const std::vector<at::Tensor> parameters_;
  const std::shared_ptr<Flags> flags_;
};

}  // namespace bagua

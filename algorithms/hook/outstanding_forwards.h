// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <utility>
#include <vector>

namespace bagua {

// The forwards whose backward may still come. One whose graph is gone has none: it needs no weights any more.
class OutstandingForwards {
 public:
  // What a forward has returned.
  void add(const std::vector<at::Tensor>& outputs);
  // All backwards have been.
  void clear() { ends_.clear(); }
  [[nodiscard]] bool any() const;

 private:
  // Versions of torch hold the nodes of a graph by one or the other.
  template <typename Node>
  static std::weak_ptr<Node> weak(const std::shared_ptr<Node>& node) {
    return node;
  }
  template <typename Node>
  static c10::weak_intrusive_ptr<Node> weak(const c10::intrusive_ptr<Node>& node) {
    return c10::weak_intrusive_ptr<Node>(node);
  }

  std::vector<decltype(weak(std::declval<const at::Tensor&>().grad_fn()))> ends_;
};

}  // namespace bagua

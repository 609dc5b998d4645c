// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "algorithms/algorithm_interfaces.h"
#include "kernels/codec.h"

namespace bagua::quantized {

inline constexpr const char* kExactByDefault = "1d, embedding, small";

// Which codec takes the gradient of which parameter, and which gradients stay exact.
class Selection {
 public:
  // `codec`: a name, or "pattern=name, pattern=name, ...", of which the first that fits the parameter's name counts; a
  // name alone fits all. `exact`: words, "1d", "embedding", "head" and "small" or patterns of names. Patterns are those
  // of the shell ("*", "?", "[]"). Throws ValueError for an unknown codec, and for one that comes after the one for
  // all.
  Selection(const std::string& codec, const std::string& exact);

  // As ReadsNames::checkNames(): throws for a pattern that fits none of them, which may be a misspelt word. Without
  // names it throws for whatever needs a model, unless `exact` is the default.
  void checkNames(const std::optional<std::vector<std::string>>& names) const;

  void useParameters(const std::vector<ParameterFacts>& facts) { facts_ = facts; }

  // All that codecOf() may name.
  [[nodiscard]] std::vector<std::shared_ptr<const Codec>> codecs() const;
  // The codec's name; empty for exact. A parameter without a name fits no pattern but "*".
  [[nodiscard]] std::string codecOf(int64_t parameter, const at::Tensor& gradient) const;

 private:
  void checkWithoutNames() const;
  [[nodiscard]] bool isExact(const ParameterFacts& facts, const at::Tensor& gradient) const;

  std::vector<std::pair<std::string, std::string>> codecs_;
  std::vector<std::string> exact_;
  std::vector<ParameterFacts> facts_;
};

}  // namespace bagua::quantized

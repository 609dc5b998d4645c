// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "algorithms/algorithm_interfaces.h"
#include "kernels/codec.h"

namespace bagua::compressed {

// Gradients of fewer elements cost more in thought than they do on the line.
inline constexpr const char* kExactByDefault = "small";

// Which codec takes the gradient of which parameter, and which gradients stay exact.
class Selection {
 public:
  // `codec`: "key=name, key=name, ...", of which the first key that fits the parameter counts; a name at the end fits
  // all. Keys, and the entries of `exact`, are words, "1d", "embedding", "head" and "small", or patterns of parameters'
  // names as those of the shell ("*", "?", "[]"). A codec that is given alone and has fewer than 8 bits stands for
  // "embedding=int8, head=int8, 1d=int8, *=codec". Throws ValueError for an unknown codec, and for one that comes after
  // the one for all.
  Selection(const std::string& codec, const std::string& exact);
  // One codec for all. Throws ValueError for an unknown one.
  static Selection ofOne(const std::string& codec) {
    CodecRegistry::find(codec);
    return {"*=" + codec, ""};
  }

  // As ReadsNames::checkNames(): throws for a pattern that fits none of them, which may be a misspelt word. Without
  // names it throws for whatever needs a model, but for what a codec alone stands for.
  void checkNames(const std::optional<std::vector<std::string>>& names) const;

  void useParameters(const std::vector<ParameterFacts>& facts) { facts_ = facts; }

  // The one that all gradients take, if there is such a one.
  [[nodiscard]] std::optional<std::string> onlyCodec() const {
    return codecs_.size() == 1 && exact_.empty() ? std::optional(codecs_.front().second) : std::nullopt;
  }
  // All that codecOf() may name.
  [[nodiscard]] std::vector<const CodecInfo*> codecs() const;
  // The codec's name; empty for exact. A parameter without a name fits no pattern but "*".
  [[nodiscard]] std::string codecOf(int64_t parameter, const at::Tensor& gradient) const;

 private:
  void checkWithoutNames() const;
  // By key.
  std::vector<std::pair<std::string, std::string>> codecs_;
  // Whether they are what a codec alone stands for.
  bool isCodecAlone_ = false;
  std::vector<std::string> exact_;
  std::vector<ParameterFacts> facts_;
};

}  // namespace bagua::compressed

// SPDX-License-Identifier: Apache-2.0
#include "algorithms/quantized_allreduce/selection.h"

#include <c10/util/Exception.h>
#include <fnmatch.h>

#include <algorithm>
#include <sstream>

#include "kernels/codec.h"

namespace bagua::quantized {
namespace {

// Gradients of fewer elements cost more in thought than they do on the line.
constexpr int64_t kSmall = 1024;

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(' ');
  if (begin == std::string::npos) return {};
  return text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

std::vector<std::string> wordsOf(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; std::getline(stream, word, ',');) {
    word = trimmed(word);
    if (!word.empty()) words.push_back(word);
  }
  return words;
}

bool fits(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

}  // namespace

Selection::Selection(const std::string& codec, const std::string& exact) : exact_(wordsOf(exact)) {
  for (const std::string& word : wordsOf(codec)) {
    const auto sign = word.find('=');
    const bool isForAll = sign == std::string::npos;
    const std::string name = isForAll ? word : trimmed(word.substr(sign + 1));
    CodecRegistry::find(name);
    codecs_.emplace_back(isForAll ? "*" : trimmed(word.substr(0, sign)), name);
  }
  TORCH_CHECK_VALUE(!codecs_.empty() && fits(codecs_.back().first, ""),
                    "option 'codec' of algorithm 'quantized_allreduce' needs a codec for all other parameters at its "
                    "end (a name alone, or '*=name'), got '",
                    codec, "'");
}

std::string Selection::codecOf(int64_t parameter, const at::Tensor& gradient) const {
  const bool isKnown = parameter >= 0 && parameter < static_cast<int64_t>(facts_.size());
  const ParameterFacts facts = isKnown ? facts_[parameter] : ParameterFacts{};
  if (isExact(facts, gradient)) return {};
  const auto found =
      std::find_if(codecs_.begin(), codecs_.end(), [&](const auto& entry) { return fits(entry.first, facts.name); });
  return found->second;
}

bool Selection::isExact(const ParameterFacts& facts, const at::Tensor& gradient) const {
  return std::any_of(exact_.begin(), exact_.end(), [&](const std::string& word) {
    if (word == "1d") return gradient.dim() <= 1;
    if (word == "small") return gradient.numel() < kSmall;
    if (word == "embedding" || word == "head") return facts.role == word;
    return !facts.name.empty() && fits(word, facts.name);
  });
}

}  // namespace bagua::quantized

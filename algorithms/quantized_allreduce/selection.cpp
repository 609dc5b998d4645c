// SPDX-License-Identifier: Apache-2.0
#include "algorithms/quantized_allreduce/selection.h"

#include <c10/util/Exception.h>
#include <fnmatch.h>

#include <algorithm>
#include <sstream>

#include "kernels/closest_names.h"

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

bool fitsAll(const std::string& pattern) { return fits(pattern, ""); }

// Of a parameter's shape, which is known without a model, and of its role, which is not.
const std::vector<std::string>& wordsOfShape() {
  static const std::vector<std::string> words{"1d", "small"};
  return words;
}
const std::vector<std::string>& wordsOfRole() {
  static const std::vector<std::string> words{"embedding", "head"};
  return words;
}

bool isOneOf(const std::vector<std::string>& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// `known`: what else than a pattern it may have been meant to be.
void checkFits(const std::string& option, const std::string& pattern, const std::vector<std::string>& names,
               std::vector<std::string> known) {
  if (std::any_of(names.begin(), names.end(), [&](const std::string& name) { return fits(pattern, name); })) return;
  const std::string words = known.empty() ? "" : "is none of its words ('1d', 'embedding', 'head', 'small') and ";
  known.insert(known.end(), names.begin(), names.end());
  TORCH_CHECK_VALUE(false, "option '", option, "' of algorithm 'quantized_allreduce' holds '", pattern, "', which ",
                    words, "fits no parameter's name", suggestionFor(pattern, known),
                    "; the names are those of ddp.module.named_parameters(), such as '", names.back(), "'");
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
  TORCH_CHECK_VALUE(!codecs_.empty() && fitsAll(codecs_.back().first),
                    "option 'codec' of algorithm 'quantized_allreduce' needs a codec for all other parameters at its "
                    "end (a name alone, or '*=name'), got '",
                    codec, "'");
  const auto first =
      std::find_if(codecs_.begin(), codecs_.end(), [](const auto& entry) { return fitsAll(entry.first); });
  TORCH_CHECK_VALUE(first + 1 == codecs_.end(),
                    "option 'codec' of algorithm 'quantized_allreduce' has a codec for all ", "other parameters, '",
                    first->second, "', after which no other is ever used, got '", codec, "'");
}

void Selection::checkNames(const std::optional<std::vector<std::string>>& names) const {
  if (!names) return checkWithoutNames();
  if (names->empty()) return;
  auto words = wordsOfShape();
  words.insert(words.end(), wordsOfRole().begin(), wordsOfRole().end());
  for (const auto& word : exact_) {
    if (!isOneOf(words, word)) checkFits("exact", word, *names, words);
  }
  for (const auto& [pattern, codec] : codecs_) {
    if (!fitsAll(pattern)) checkFits("codec", pattern, *names, {});
  }
}

void Selection::checkWithoutNames() const {
  constexpr const char* kAdvice =
      ", which only a model can tell: bagua.comm_hook is given none. Take bagua.register_comm_hook";
  const bool isDefault = exact_ == wordsOf(kExactByDefault);
  for (const auto& word : exact_) {
    TORCH_CHECK_VALUE(isDefault || isOneOf(wordsOfShape(), word),
                      "option 'exact' of algorithm 'quantized_allreduce' holds '", word, "'",
                      isOneOf(wordsOfRole(), word) ? "" : ", a pattern of parameters' names", kAdvice);
  }
  for (const auto& [pattern, codec] : codecs_) {
    TORCH_CHECK_VALUE(fitsAll(pattern), "option 'codec' of algorithm 'quantized_allreduce' holds '", pattern,
                      "', a pattern of parameters' names", kAdvice);
  }
}

std::vector<std::shared_ptr<const Codec>> Selection::codecs() const {
  std::vector<std::shared_ptr<const Codec>> all;
  for (const auto& [pattern, codec] : codecs_) all.push_back(CodecRegistry::find(codec).codec);
  return all;
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
    if (isOneOf(wordsOfRole(), word)) return facts.role == word;
    return !facts.name.empty() && fits(word, facts.name);
  });
}

}  // namespace bagua::quantized

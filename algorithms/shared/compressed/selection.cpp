// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/selection.h"

#include <c10/util/Exception.h>
#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <sstream>

#include "kernels/closest_names.h"

namespace bagua::compressed {
namespace {

// Elements of a parameter.
constexpr int64_t kSmall = 1024;
// And of a part of it that travels by itself: what is below a group of the codecs shares its scale with others.
constexpr int64_t kSmallPart = 128;

// What 8 bits code beside few bits elsewhere: few bits would harm these most, as rows of embeddings and heads are used
// rarely and unevenly, and save least on 1-D parameters, which are few.
constexpr std::array kFinerRoles = {"embedding", "head", "1d"};
constexpr const char* kFinerCodec = "int8";

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

std::vector<std::string> allWords() {
  auto words = wordsOfShape();
  words.insert(words.end(), wordsOfRole().begin(), wordsOfRole().end());
  return words;
}

// `key`: a word or a pattern.
void checkFits(const std::string& option, const std::string& key, const std::vector<std::string>& names) {
  auto known = allWords();
  if (isOneOf(known, key)) return;
  if (std::any_of(names.begin(), names.end(), [&](const std::string& name) { return fits(key, name); })) return;
  known.insert(known.end(), names.begin(), names.end());
  TORCH_CHECK_VALUE(false, "option '", option, "' of algorithm 'quantized_allreduce' holds '", key,
                    "', which is none of its words ('1d', 'embedding', 'head', 'small') and fits no parameter's name",
                    suggestionFor(key, known), "; the names are those of ddp.module.named_parameters(), such as '",
                    names.back(), "'");
}

void checkNeedsNoModel(const std::string& option, const std::string& key) {
  TORCH_CHECK_VALUE(isOneOf(wordsOfShape(), key), "option '", option, "' of algorithm 'quantized_allreduce' holds '",
                    key, "'", isOneOf(wordsOfRole(), key) ? "" : ", a pattern of parameters' names",
                    ", which only a model can tell: bagua.comm_hook is given none. Take bagua.register_comm_hook");
}

bool isMeant(const std::string& key, const ParameterFacts& facts, const at::Tensor& gradient) {
  if (key == "1d") return gradient.dim() <= 1;
  if (key == "small") {
    return gradient.numel() < kSmallPart || std::max(facts.elements, gradient.numel()) < kSmall;
  }
  if (isOneOf(wordsOfRole(), key)) return facts.role == key;
  return fits(key, facts.name);
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
  isCodecAlone_ = codec.find('=') == std::string::npos;
  if (!isCodecAlone_ || CodecRegistry::find(codecs_.back().second).bitsPerElement() >= 8) return;
  for (const char* const role : kFinerRoles) codecs_.emplace(codecs_.end() - 1, role, kFinerCodec);
}

void Selection::checkNames(const std::optional<std::vector<std::string>>& names) const {
  if (!names) return checkWithoutNames();
  if (names->empty()) return;
  for (const auto& key : exact_) checkFits("exact", key, *names);
  for (const auto& [key, codec] : codecs_) {
    if (!fitsAll(key)) checkFits("codec", key, *names);
  }
}

void Selection::checkWithoutNames() const {
  for (const auto& key : exact_) checkNeedsNoModel("exact", key);
  if (isCodecAlone_) return;
  for (const auto& [key, codec] : codecs_) {
    if (!fitsAll(key)) checkNeedsNoModel("codec", key);
  }
}

std::vector<const CodecInfo*> Selection::codecs() const {
  std::vector<const CodecInfo*> all;
  for (const auto& [key, codec] : codecs_) all.push_back(&CodecRegistry::find(codec));
  return all;
}

std::string Selection::codecOf(int64_t parameter, const at::Tensor& gradient) const {
  const bool isKnown = parameter >= 0 && parameter < static_cast<int64_t>(facts_.size());
  const ParameterFacts facts = isKnown ? facts_[parameter] : ParameterFacts{};
  if (std::any_of(exact_.begin(), exact_.end(), [&](const auto& key) { return isMeant(key, facts, gradient); })) {
    return {};
  }
  const auto found = std::find_if(codecs_.begin(), codecs_.end(),
                                  [&](const auto& entry) { return isMeant(entry.first, facts, gradient); });
  return found->second;
}

}  // namespace bagua::compressed

// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/sections.h"

#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <utility>

#include "algorithms/shared/compressed/slots.h"

namespace bagua::compressed {
namespace {

int64_t lengthOf(const CodecSection& section) {
  int64_t length = 0;
  for (const auto& piece : section.pieces) length += piece.end - piece.begin;
  return length;
}

}  // namespace

void CodecSection::scatterTo(const at::Tensor& whole) const {
  int64_t begin = 0;
  for (const auto& piece : pieces) {
    const int64_t length = piece.end - piece.begin;
    elementsOf(whole, piece).copy_(flat.narrow(0, begin, length));
    begin += length;
  }
}

std::vector<CodecSection> sectionsOf(const Bucket& bucket, const CodecOf& codecOf) {
  std::map<std::string, CodecSection> byCodec;
  int64_t begin = 0;
  for (const auto& entry : bucket.entries) {
    const std::string codec = codecOf(entry);
    CodecSection& section = byCodec[codec];
    section.codec = codec;
    section.entries.push_back(entry);
    section.pieces.push_back({begin, begin + entry.gradient.numel()});
    begin += entry.gradient.numel();
  }
  TORCH_INTERNAL_ASSERT(begin == bucket.flat.numel());
  std::vector<CodecSection> sections;
  for (auto& [codec, section] : byCodec) sections.push_back(std::move(section));
  std::stable_sort(sections.begin(), sections.end(),
                   [](const CodecSection& a, const CodecSection& b) { return lengthOf(a) > lengthOf(b); });
  const bool keepsPlace = lengthOf(sections.front()) * 4 >= bucket.flat.numel() * 3;
  for (size_t i = keepsPlace ? 1 : 0; i < sections.size(); ++i) {
    std::vector<at::Tensor> values;
    for (const auto& piece : sections[i].pieces) values.push_back(elementsOf(bucket.flat, piece));
    sections[i].flat = at::cat(values);
    if (!keepsPlace) continue;
    for (const auto& value : values) value.zero_();
  }
  if (!keepsPlace) return sections;
  CodecSection& first = sections.front();
  first.flat = bucket.flat;
  first.entries = bucket.entries;
  first.pieces.clear();
  return sections;
}

}  // namespace bagua::compressed

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

// A section keeps the bucket's own tensor where at most one element in so many is another's: what it sends for them is
// for nothing, and 3 % more on the line.
constexpr int64_t kPlacesOfOthers = 32;

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

void CodecSection::scatterPartTo(const at::Tensor& part, const at::Tensor& own) const {
  int64_t begin = 0;
  for (auto piece = pieces.begin(); piece != pieces.end() && begin < own.numel(); ++piece) {
    const int64_t length = piece->end - piece->begin;
    elementsOf(part, *piece).copy_(own.narrow(0, begin, length));
    begin += length;
  }
}

std::vector<CodecSection> sectionsOf(const Bucket& bucket, const CodecOf& codecOf, int parts) {
  std::map<std::string, CodecSection> byCodec;
  const size_t perPart = bucket.entries.size() / parts;
  int64_t begin = 0;
  for (size_t i = 0; i < bucket.entries.size(); ++i) {
    const BucketEntry& entry = bucket.entries[i];
    const std::string codec = codecOf(bucket.entries[i % perPart]);
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
  const int64_t others = bucket.flat.numel() - lengthOf(sections.front());
  const bool keepsPlace = others * kPlacesOfOthers <= bucket.flat.numel();
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

void arrangeParts(Bucket& bucket, const std::vector<int>& ranks) {
  if (std::is_sorted(ranks.begin(), ranks.end())) return;
  const auto parts = bucket.flat.chunk(static_cast<int64_t>(ranks.size()));
  const size_t perPart = bucket.entries.size() / ranks.size();
  std::vector<at::Tensor> arranged;
  for (const int rank : ranks) arranged.push_back(parts[rank]);
  bucket.flat = at::cat(arranged);
  std::vector<BucketEntry> entries;
  int64_t begin = 0;
  for (const int rank : ranks) {
    for (size_t i = rank * perPart; i < (rank + 1) * perPart; ++i) {
      const auto& [parameter, gradient, isUsed] = bucket.entries[i];
      entries.push_back({parameter, bucket.flat.narrow(0, begin, gradient.numel()).view(gradient.sizes()), isUsed});
      begin += gradient.numel();
    }
  }
  bucket.entries = std::move(entries);
}

std::vector<int64_t> inAllParts(const std::vector<int64_t>& parameters, const BucketEntries& entries, int parts) {
  const size_t perPart = entries.size() / parts;
  std::vector<int64_t> all;
  for (size_t i = 0; i < entries.size(); ++i) {
    const int64_t first = entries[i % perPart].parameter;
    const bool isMeant = std::find(parameters.begin(), parameters.end(), first) != parameters.end();
    if (isMeant) all.push_back(entries[i].parameter);
  }
  return all;
}

}  // namespace bagua::compressed

// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/bucket_layout.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <set>
#include <string>

#include "backend/operation/hash.h"

namespace bagua {
namespace {

// `slice` is the gradient's place in the bucket, one-dimensional; DDP fills it in the memory order of the parameter
// wherever that leaves no gaps.
at::Tensor likeParameter(const at::Tensor& slice, const at::Tensor& parameter) {
  if (!parameter.is_non_overlapping_and_dense()) return slice.view(parameter.sizes());
  return slice.as_strided(parameter.sizes(), parameter.strides(), slice.storage_offset());
}

uint64_t hashOf(const std::vector<std::vector<BucketEntry>>& parts) {
  uint64_t hash = kHashSeed;
  for (const auto& part : parts) {
    hash = mix(hash, part.size());
    for (const auto& entry : part) hash = mix(hash, static_cast<uint64_t>(entry.parameter)) ^ (hash >> 29U);
  }
  return hash;
}

// "5-3, 8": neighbouring positions in one, upwards or downwards.
std::string textOf(const std::vector<BucketEntry>& part) {
  std::string text;
  for (size_t begin = 0, end = 0; begin < part.size(); begin = end) {
    const int64_t first = part[begin].parameter;
    const int64_t direction = begin + 1 < part.size() ? part[begin + 1].parameter - first : 0;
    end = begin + 1;
    while ((direction == 1 || direction == -1) && end < part.size() &&
           part[end].parameter == part[end - 1].parameter + direction) {
      ++end;
    }
    text += c10::str(text.empty() ? "" : ", ", first);
    if (end > begin + 1) text += c10::str("-", part[end - 1].parameter);
  }
  return text;
}

}  // namespace

uint64_t bucketKey(uint64_t seed, int64_t step, const std::vector<BucketEntry>& entries) {
  const int64_t first = entries.empty() ? -1 : entries.front().parameter;
  return mix(mix(mix(kHashSeed, seed), static_cast<uint64_t>(step)), static_cast<uint64_t>(first));
}

BucketLayouts::BucketLayouts(const std::vector<at::Tensor>& parameters, int64_t unusualSteps)
    : isLearning_(parameters.empty()), unusualSteps_(unusualSteps) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    positions_.emplace(parameters[i].unsafeGetTensorImpl(), static_cast<int64_t>(i));
  }
}

int64_t BucketLayouts::positionOf(const at::Tensor& parameter) {
  const auto known = positions_.find(parameter.unsafeGetTensorImpl());
  if (known != positions_.end()) return known->second;
  TORCH_CHECK(isLearning_, "bagua: DDP handed over the gradient of a parameter that the model did ",
              "not have when the hook was registered: register the hook again on a new DistributedDataParallel");
  const auto position = static_cast<int64_t>(learnt_.size());
  positions_.emplace(parameter.unsafeGetTensorImpl(), position);
  learnt_.push_back(parameter);
  return position;
}

std::vector<BucketEntry> BucketLayouts::entriesOf(const c10d::GradBucket& gradients) {
  std::vector<BucketEntry> entries;
  if (gradients.getBuffer().is_sparse()) return entries;
  const auto parameters = gradients.getParameters();
  int64_t begin = 0;
  for (const auto& parameter : parameters) {
    const at::Tensor slice = gradients.getBuffer().narrow(0, begin, parameter.numel());
    entries.push_back({positionOf(parameter), likeParameter(slice, parameter)});
    begin += parameter.numel();
  }
  return entries;
}

std::vector<std::vector<BucketEntry>> BucketLayouts::partsOf(const std::vector<BucketEntry>& bucket) const {
  if (wanted_.empty() || bucket.empty()) return {bucket};
  std::unordered_map<int64_t, const BucketEntry*> entries;
  for (const auto& entry : bucket) entries.emplace(entry.parameter, &entry);
  std::vector<std::vector<BucketEntry>> parts;
  size_t covered = 0;
  for (const auto& group : wanted_) {
    std::vector<BucketEntry> part;
    for (const int64_t position : group) {
      const auto entry = entries.find(position);
      if (entry != entries.end()) part.push_back(*entry->second);
    }
    if (part.size() != group.size()) continue;
    covered += part.size();
    parts.push_back(std::move(part));
  }
  if (covered != bucket.size()) return {bucket};
  return parts;
}

std::shared_ptr<const GradientList> BucketLayouts::gradientsOf(const std::vector<std::vector<BucketEntry>>& parts) {
  if (parts.front().empty()) return nullptr;
  const uint64_t hash = hashOf(parts);
  auto& known = gradientLists_[hash];
  if (!known) {
    std::string text;
    for (const auto& part : parts) text += c10::str(text.empty() ? "" : "|", textOf(part));
    known = std::make_shared<const GradientList>(
        GradientList{.text = text, .hash = static_cast<uint32_t>(hash ^ (hash >> 32U))});
  }
  return known;
}

void BucketLayouts::note(const std::vector<std::vector<BucketEntry>>& parts, bool isFirst, bool isLast) {
  if (isFirst) current_.clear();
  for (const auto& part : parts) {
    if (!part.empty()) current_.push_back(positionsOf(part));
  }
  if (!isLast) return;
  last_ = current_;
  ++steps_;
}

void BucketLayouts::check(const BucketLayout& layout) const {
  std::set<int64_t> seen;
  for (const auto& group : layout) {
    for (const int64_t position : group) {
      TORCH_CHECK_VALUE(
          position >= 0 && position < static_cast<int64_t>(positions_.size()) && seen.insert(position).second,
          "bagua: the bucket layout of the checkpoint does not fit this model, which has ", positions_.size(),
          " trainable parameters (position ", position, ")");
    }
  }
}

bool isSameOrder(const std::vector<BucketEntry>& one, const std::vector<BucketEntry>& other) {
  return positionsOf(one) == positionsOf(other);
}

Bucket gatherPart(const std::vector<BucketEntry>& part) {
  int64_t numel = 0;
  for (const auto& entry : part) numel += entry.gradient.numel();
  Bucket bucket{.flat = at::empty({numel}, part.front().gradient.options().memory_format(std::nullopt))};
  int64_t begin = 0;
  for (const auto& entry : part) {
    const at::Tensor place = likeParameter(bucket.flat.narrow(0, begin, entry.gradient.numel()), entry.gradient);
    place.copy_(entry.gradient);
    bucket.entries.push_back({entry.parameter, place, entry.isUsed});
    begin += entry.gradient.numel();
  }
  return bucket;
}

void scatterPart(const Bucket& bucket, const std::vector<BucketEntry>& part) {
  for (size_t i = 0; i < part.size(); ++i) part[i].gradient.copy_(bucket.entries[i].gradient);
}

}  // namespace bagua

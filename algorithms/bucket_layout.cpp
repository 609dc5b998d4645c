// SPDX-License-Identifier: Apache-2.0
#include "algorithms/bucket_layout.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <set>

namespace bagua {
namespace {

// `slice` is the gradient's place in the bucket, one-dimensional; DDP fills it in the memory order of the parameter
// wherever that leaves no gaps.
at::Tensor likeParameter(const at::Tensor& slice, const at::Tensor& parameter) {
  if (!parameter.is_non_overlapping_and_dense()) return slice.view(parameter.sizes());
  return slice.as_strided(parameter.sizes(), parameter.strides(), slice.storage_offset());
}

std::vector<int64_t> positionsOf(const std::vector<BucketEntry>& entries) {
  std::vector<int64_t> positions;
  positions.reserve(entries.size());
  for (const auto& entry : entries) positions.push_back(entry.parameter);
  return positions;
}

}  // namespace

BucketLayouts::BucketLayouts(const std::vector<at::Tensor>& parameters, int64_t unusualSteps)
    : unusualSteps_(unusualSteps) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    positions_.emplace(parameters[i].unsafeGetTensorImpl(), static_cast<int64_t>(i));
  }
}

std::vector<BucketEntry> BucketLayouts::entriesOf(const c10d::GradBucket& gradients) const {
  std::vector<BucketEntry> entries;
  if (positions_.empty() || gradients.getBuffer().is_sparse()) return entries;
  const auto parameters = gradients.getParameters();
  int64_t begin = 0;
  for (const auto& parameter : parameters) {
    const auto position = positions_.find(parameter.unsafeGetTensorImpl());
    TORCH_CHECK(position != positions_.end(), "bagua: DDP handed over the gradient of a parameter that the model did ",
                "not have when the hook was registered: register the hook again on a new DistributedDataParallel");
    const at::Tensor slice = gradients.getBuffer().narrow(0, begin, parameter.numel());
    entries.push_back({position->second, likeParameter(slice, parameter)});
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
    bucket.entries.push_back({entry.parameter, place});
    begin += entry.gradient.numel();
  }
  return bucket;
}

void scatterPart(const Bucket& bucket, const std::vector<BucketEntry>& part) {
  for (size_t i = 0; i < part.size(); ++i) part[i].gradient.copy_(bucket.entries[i].gradient);
}

}  // namespace bagua

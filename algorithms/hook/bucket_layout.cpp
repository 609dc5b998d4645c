// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/bucket_layout.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <set>
#include <string>
#include <utility>

#include "backend/operation/hash.h"

namespace bagua {
namespace {

at::Tensor gradientIn(const at::Tensor& flat, const GradientSlot& slot) {
  if (slot.gradient.defined()) return slot.gradient;
  if (!slot.strides.empty()) return flat.as_strided(slot.sizes, slot.strides, flat.storage_offset() + slot.begin);
  return flat.narrow(0, slot.begin, c10::multiply_integers(slot.sizes)).view(slot.sizes);
}

uint64_t hashOfParts(const std::vector<Slots>& parts) {
  uint64_t hash = kHashSeed;
  for (const auto& part : parts) {
    hash = mix(hash, part.size());
    for (const auto& slot : part) hash = mix(hash, static_cast<uint64_t>(slot.parameter)) ^ (hash >> 29U);
  }
  return hash;
}

// "5-3, 8": neighbouring positions in one, upwards or downwards.
std::string textOf(const Slots& part) {
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

uint64_t bucketKey(uint64_t seed, int64_t step, int64_t parameter) {
  return mix(mix(mix(kHashSeed, seed), static_cast<uint64_t>(step)), static_cast<uint64_t>(parameter));
}

std::vector<BucketEntry> entriesOf(const at::Tensor& flat, const Slots& slots) {
  std::vector<BucketEntry> entries;
  entries.reserve(slots.size());
  for (const auto& slot : slots) entries.push_back({slot.parameter, gradientIn(flat, slot), slot.isUsed});
  return entries;
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

Slots BucketLayouts::slotsOf(const c10d::GradBucket& gradients) {
  Slots slots;
  if (gradients.getBuffer().is_sparse()) return slots;
  const auto parameters = gradients.getParameters();
  slots.reserve(parameters.size());
  int64_t begin = 0;
  for (const auto& parameter : parameters) {
    // DDP fills the place in the memory order of the parameter wherever that leaves no gaps.
    GradientSlot slot{.parameter = positionOf(parameter), .begin = begin};
    slot.sizes.assign(parameter.sizes().begin(), parameter.sizes().end());
    if (parameter.is_non_overlapping_and_dense()) {
      slot.strides.assign(parameter.strides().begin(), parameter.strides().end());
    }
    slots.push_back(std::move(slot));
    begin += parameter.numel();
  }
  return slots;
}

std::vector<Slots> BucketLayouts::partsOf(const Slots& bucket) const {
  if (wanted_.empty() || bucket.empty()) return {bucket};
  std::unordered_map<int64_t, const GradientSlot*> slots;
  for (const auto& slot : bucket) slots.emplace(slot.parameter, &slot);
  std::vector<Slots> parts;
  size_t covered = 0;
  for (const auto& group : wanted_) {
    Slots part;
    for (const int64_t position : group) {
      const auto slot = slots.find(position);
      if (slot != slots.end()) part.push_back(*slot->second);
    }
    if (part.size() != group.size()) continue;
    covered += part.size();
    parts.push_back(std::move(part));
  }
  if (covered != bucket.size()) return {bucket};
  return parts;
}

std::shared_ptr<const GradientList> BucketLayouts::gradientsOf(const std::vector<Slots>& parts) {
  if (parts.front().empty()) return nullptr;
  const uint64_t hash = hashOfParts(parts);
  auto& known = gradientLists_[hash];
  if (!known) {
    std::string text;
    for (const auto& part : parts) text += c10::str(text.empty() ? "" : "|", textOf(part));
    known = std::make_shared<const GradientList>(
        GradientList{.text = text, .hash = static_cast<uint32_t>(hash ^ (hash >> 32U))});
  }
  return known;
}

void BucketLayouts::note(const Slots& bucket, const std::vector<Slots>& parts, bool isFirst) {
  if (isFirst) {
    current_.clear();
    isWhole_ = true;
  }
  for (const auto& part : parts) {
    if (!part.empty()) current_.push_back(positionsOf(part));
  }
  isWhole_ = isWhole_ && parts.size() == 1 && isSameOrder(parts.front(), bucket);
}

void BucketLayouts::noteEnd() {
  last_ = current_;
  ++steps_;
  if (isWhole_ && steps_ > unusualSteps_ && last_ == wanted_) wanted_.clear();
}

void BucketLayouts::check(const BucketLayout& layout) const {
  std::set<int64_t> seen;
  for (const auto& group : layout) {
    for (const int64_t position : group) {
      // Who is given no model learns of parameters as gradients come.
      const bool isKnown = isLearning_ || position < static_cast<int64_t>(positions_.size());
      TORCH_CHECK_VALUE(position >= 0 && isKnown && seen.insert(position).second,
                        "bagua: the bucket layout of the checkpoint does not fit this model, which has ",
                        positions_.size(), " trainable parameters (position ", position, ")");
    }
  }
}

bool isSameOrder(const Slots& one, const Slots& other) { return positionsOf(one) == positionsOf(other); }

Bucket gatherPart(const std::vector<BucketEntry>& part) {
  int64_t numel = 0;
  for (const auto& entry : part) numel += entry.gradient.numel();
  Bucket bucket{.flat = at::empty({numel}, part.front().gradient.options().memory_format(std::nullopt))};
  int64_t begin = 0;
  for (const auto& entry : part) {
    const at::Tensor& gradient = entry.gradient;
    const bool isDense = gradient.is_non_overlapping_and_dense();
    const at::Tensor place = isDense ? bucket.flat.as_strided(gradient.sizes(), gradient.strides(), begin)
                                     : bucket.flat.narrow(0, begin, gradient.numel()).view(gradient.sizes());
    place.copy_(gradient);
    bucket.entries.push_back({entry.parameter, place, entry.isUsed});
    begin += gradient.numel();
  }
  return bucket;
}

void scatterPart(const Bucket& bucket, const std::vector<BucketEntry>& part) {
  for (size_t i = 0; i < part.size(); ++i) part[i].gradient.copy_(bucket.entries[i].gradient);
}

}  // namespace bagua

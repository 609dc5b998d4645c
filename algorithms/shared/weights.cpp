// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/weights.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/sub.h>
#include <c10/util/Exception.h>

#include <limits>

#include "backend/operation/sparse_reduction.h"

namespace bagua {

WeightBucket::WeightBucket(std::vector<at::Tensor> parameters, std::vector<int64_t> positions)
    : parameters_(std::move(parameters)), positions_(std::move(positions)) {
  for (const auto& parameter : parameters_) numel_ += parameter.numel();
}

template <typename Visit>
void WeightBucket::forEachPart(const at::Tensor& flat, Visit&& visit) const {
  TORCH_INTERNAL_ASSERT(flat.numel() == numel_);
  int64_t begin = 0;
  for (const auto& parameter : parameters_) {
    visit(parameter, flat.narrow(0, begin, parameter.numel()).view(parameter.sizes()));
    begin += parameter.numel();
  }
}

BucketEntries WeightBucket::entriesOf(const at::Tensor& flat) const {
  std::vector<BucketEntry> entries;
  forEachPart(flat, [&](const at::Tensor& /*parameter*/, const at::Tensor& part) {
    entries.push_back({positions_[entries.size()], part});
  });
  return entries;
}

at::Tensor WeightBucket::pack() const { return packAs(parameters_.front().scalar_type()); }

at::Tensor WeightBucket::packAs(at::ScalarType dtype) const {
  at::Tensor flat = at::empty({numel_}, parameters_.front().options().dtype(dtype).memory_format(std::nullopt));
  forEachPart(flat, [](const at::Tensor& parameter, const at::Tensor& part) { part.copy_(parameter); });
  return flat;
}

void WeightBucket::subtractFrom(const at::Tensor& flat, const at::Tensor& difference) const {
  int64_t begin = 0;
  forEachPart(difference, [&](const at::Tensor& parameter, const at::Tensor& part) {
    at::Tensor result = part;
    at::sub_out(result, flat.narrow(0, begin, parameter.numel()).view(parameter.sizes()), parameter);
    begin += parameter.numel();
  });
}

void WeightBucket::mixWith(const at::Tensor& flat, double mixing) const {
  if (mixing == 0) return unpack(flat);
  forEachPart(flat, [mixing](const at::Tensor& parameter, const at::Tensor& part) {
    // The same bits, without two tensors that hold them for a moment.
    if (parameter.scalar_type() == part.scalar_type()) {
      at::Tensor mixed = parameter;
      at::lerp_out(mixed, part, parameter, mixing);
      return;
    }
    parameter.copy_(part.lerp(parameter.to(part.scalar_type()), mixing));
  });
}

void WeightBucket::unpack(const at::Tensor& flat) const {
  forEachPart(flat, [](const at::Tensor& parameter, const at::Tensor& part) { parameter.copy_(part); });
}

void WeightBucket::add(const at::Tensor& flat) const {
  forEachPart(flat, [](const at::Tensor& parameter, const at::Tensor& part) { parameter.add_(part); });
}

std::vector<WeightBucket> weightBuckets(const std::vector<at::Tensor>& parameters, int64_t bucketBytes) {
  struct Open {
    std::vector<at::Tensor> parameters;
    std::vector<int64_t> positions;
    int64_t bytes = 0;
  };
  std::vector<Open> groups;
  for (auto parameter = parameters.rbegin(); parameter != parameters.rend(); ++parameter) {
    auto group = groups.begin();
    while (group != groups.end() &&
           (group->bytes >= bucketBytes || group->parameters[0].scalar_type() != parameter->scalar_type() ||
            group->parameters[0].device() != parameter->device())) {
      ++group;
    }
    if (group == groups.end()) group = groups.emplace(group);
    group->parameters.push_back(*parameter);
    group->positions.push_back(parameters.rend() - parameter - 1);
    group->bytes += static_cast<int64_t>(parameter->nbytes());
  }
  std::vector<WeightBucket> buckets;
  buckets.reserve(groups.size());
  for (auto& group : groups) buckets.emplace_back(std::move(group.parameters), std::move(group.positions));
  return buckets;
}

std::vector<WeightBucket> weightBuckets(const std::vector<at::Tensor>& parameters) {
  return weightBuckets(parameters, std::numeric_limits<int64_t>::max());
}

std::vector<at::Tensor> packAll(const std::vector<WeightBucket>& buckets) {
  std::vector<at::Tensor> flats;
  flats.reserve(buckets.size());
  for (const auto& bucket : buckets) flats.push_back(bucket.pack());
  return flats;
}

void unpackAll(const std::vector<WeightBucket>& buckets, const std::vector<at::Tensor>& flats) {
  for (size_t i = 0; i < buckets.size(); ++i) buckets[i].unpack(flats[i]);
}

namespace {

template <typename Call>
void replace(StepContext& context, const std::vector<at::Tensor>& tensors, const char* name, const char* stageName,
             Call call) {
  if (tensors.empty()) return;
  const auto buckets = weightBuckets(tensors);
  std::vector<at::Tensor> flats = packAll(buckets);
  context
      .submit(name, flats, StepContext::Wait::kNow,
              [flats, stageName, call](Communicator& communicator, StageSeconds& seconds) mutable {
                const Stage stage(seconds, stageName);
                for (auto& flat : flats) call(flat, communicator);
              })
      ->wait(kNoTimeout);
  unpackAll(buckets, flats);
}

}  // namespace

void averageWeights(StepContext& context) { averageTensors(context, context.parameters()); }

void broadcastWeights(StepContext& context) { broadcastTensors(context, context.parameters()); }

void averageTensors(StepContext& context, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> dense;
  for (const auto& tensor : tensors) {
    if (!tensor.is_sparse()) {
      dense.push_back(tensor);
      continue;
    }
    context
        .submit("bagua:average_weights", {tensor}, StepContext::Wait::kNow,
                [sparse = tensor](Communicator& communicator, StageSeconds& seconds) mutable {
                  const Stage stage(seconds, stages::kAverageWeights);
                  allReduceSparse(communicator, sparse, /*average=*/true);
                })
        ->wait(kNoTimeout);
  }
  replace(context, dense, "bagua:average_weights", stages::kAverageWeights,
          [](at::Tensor& flat, Communicator& communicator) { communicator.allReduce(flat, c10d::ReduceOp::AVG); });
}

void broadcastTensors(StepContext& context, const std::vector<at::Tensor>& tensors) {
  replace(context, tensors, "bagua:broadcast_weights", stages::kBroadcastWeights,
          [](at::Tensor& flat, Communicator& communicator) { communicator.broadcast(flat, 0); });
}

int64_t versionOf(const std::vector<at::Tensor>& parameters) {
  int64_t version = 0;
  for (const auto& parameter : parameters) version += parameter._version();
  return version;
}

}  // namespace bagua

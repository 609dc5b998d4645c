// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/bucket_program.h"

#include "algorithms/algorithm_interfaces.h"
#include "backend/operation/sparse_reduction.h"

namespace bagua {
namespace {

// Of all that algorithms draw at random.
constexpr uint64_t kSeed = 0;

}  // namespace

void BucketProgram::reduce(Bucket& bucket, int64_t firstParameter, Algorithm& algorithm, Communicator& communicator,
                           StageSeconds& seconds) {
  bucket.step = step;
  bucket.tellsUse = tellsUse;
  bucket.isCaptured = isCaptured;
  bucket.retained = retained;
  bucket.firstParameter = firstParameter;
  bucket.key = bucketKey(kSeed, step, firstParameter);
  bucket.isInParts = isInParts;
  bucket.isOfFirstShards = isOfFirstShards;
  switch (way) {
    case Way::kReduce:
      algorithm.reduce(bucket, communicator);
      break;
    case Way::kReduceToParts:
      algorithm.as<ReducesToParts>()->reduceToParts(bucket, own, communicator);
      break;
    case Way::kPassOver:
      algorithm.as<KeepsResiduals>()->passOver(bucket, communicator);
  }
  seconds.take(bucket.seconds);
}

void BucketProgram::run(Algorithm& algorithm, Communicator& communicator, StageSeconds& seconds) {
  if (gradients.is_sparse()) {
    const Stage stage(seconds, stages::kSparseAllReduce);
    allReduceSparse(communicator, gradients, algorithm.traits().averagesSparse);
    if (auto* const keeps = algorithm.as<KeepsState>()) keeps->endSparse(gradients._values(), step);
    return;
  }
  if (way != Way::kReduce || (parts.size() == 1 && isSameOrder(parts[0], whole))) {
    Bucket bucket{.flat = gradients, .entries = BucketEntries([this] { return entriesOf(gradients, whole); })};
    return reduce(bucket, whole.front().parameter, algorithm, communicator, seconds);
  }
  for (const auto& part : parts) {
    const auto entries = entriesOf(gradients, part);
    Bucket bucket = gatherPart(entries);
    reduce(bucket, part.front().parameter, algorithm, communicator, seconds);
    scatterPart(bucket, entries);
  }
}

}  // namespace bagua

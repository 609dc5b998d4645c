// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "algorithms/algorithm.h"
#include "algorithms/hook/bucket_layout.h"

namespace bagua {

// The gradients that DDP handed over together, on their way through an algorithm. Lives as long as the program that
// reduces them.
struct BucketProgram {
  // The algorithm does this with the gradients. It leaves the mean in their place, or in `own`: see ReducesToParts.
  enum class Way : uint8_t { kReduce, kReduceToParts, kPassOver };

  at::Tensor gradients;
  Slots whole;
  // What travels apart, as BucketLayouts::partsOf makes them.
  std::vector<Slots> parts;
  int64_t step = 0;
  bool tellsUse = false;
  bool isCaptured = false;
  Way way = Way::kReduce;
  // The gradients are in parts, of which this rank's mean goes to `own`.
  bool isInParts = false;
  bool isOfFirstShards = true;
  at::Tensor own = {};
  // Bucket::retained of all parts.
  std::shared_ptr<Bucket::Retained> retained = std::make_shared<Bucket::Retained>();

  // Replaces the gradients by what `algorithm` makes of them.
  void run(Algorithm& algorithm, Communicator& communicator, StageSeconds& seconds);

 private:
  void reduce(Bucket& bucket, int64_t firstParameter, Algorithm& algorithm, Communicator& communicator,
              StageSeconds& seconds);
};

}  // namespace bagua

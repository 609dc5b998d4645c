// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "algorithms/bucket.h"
#include "algorithms/options.h"
#include "backend/communicator.h"

namespace bagua {

// What the ranks hold after a step; decides which contract tests apply.
enum class Agreement {
  kIdentical,  // the same bits on every rank
  kEventual,   // ranks differ and are drawn together
};

// One way to make the ranks of a data-parallel job agree. An instance serves one model. Its methods run as programs, in
// order, on the executor of the model's device, and issue the same calls on every rank.
class Algorithm {
 public:
  virtual ~Algorithm() = default;

  // Replaces the gradients of one bucket by what the optimizer is to see. Dense, any floating dtype.
  virtual void reduce(Bucket& bucket, Communicator& communicator) = 0;

  // Whether the result is the mean over the ranks (else their sum). Sparse gradients, which no codec takes, are reduced
  // in full precision accordingly.
  [[nodiscard]] virtual bool averages() const { return true; }
};

struct AlgorithmInfo {
  std::string name;
  std::string summary;
  Agreement agreement = Agreement::kIdentical;
  // Acts on weights or momentum, so that the hook has to know the optimizer.
  bool needsOptimizer = false;
  std::vector<OptionInfo> options;
  std::function<std::unique_ptr<Algorithm>(const Options&)> create;
};

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "algorithms/bucket.h"
#include "algorithms/options.h"
#include "backend/communicator.h"
#include "kernels/registry.h"

// An algorithm is one way to make the ranks of a data-parallel job agree. An instance serves one model.
//
// It is a class derived from Algorithm, whose reduce() is straight-line code over a Communicator, and an
// AlgorithmInfo that registers it by name. If that is all, it is done.
// A class that does what few do also derives from interfaces in algorithm_interfaces.h:
//
//   KeepsState         remembers something from step to step, which checkpoints hold
//   KeepsResiduals     remembers gradients in their own scale (error feedback)
//   ReducesToParts     gives each rank its part of the mean alone, for sharded models
//   ActsOnWeights      exchanges weights on the thread that trains, beside gradients or in their place
//   RunsInBackground   communicates beside the steps, and can be stopped
//   CountsSkippedSteps takes a step also where GradScaler skips the optimizer's
//   UsesMomenta        sends the optimizer's momenta (QAdamOptimizer)
//   ReadsNames         has options that name the model's parameters
//   ReadsOptimizer     chooses something by the kind of the optimizer
//   IsGuarded          looks at what its coding does
namespace bagua {

// Callers may rely on this of Algorithm::reduce(). It is settled when the algorithm is created. An algorithm that says
// nothing gets the slow way, which is right for any reduce().
struct ReduceTraits {
  // reduce() may run for two buckets at a time, on threads and communicators of their own, and they may end in any
  // order: it writes to nothing but its bucket and the state of the bucket's own parameters.
  bool bucketsMayOverlap = false;
  // reduce() keeps nothing: its bucket, and memory that it takes and drops, are all that it uses. On CUDA buckets
  // overlap only then, because torch's allocator would give memory that one stream has returned to that stream at once,
  // though a program on another may still read it.
  bool isStateless = false;
  // All steps are the same work on the same memory, so that a CUDA graph that holds one of them may be replayed in
  // place of others: nothing is kept from step to step, drawn at random, or chosen by the number of the step.
  bool isReplayable = false;
  // The messages of reduce() depend on Bucket::step, so that ranks have to compare that.
  bool sendsByStep = false;
  // Sparse gradients, which no codec takes, do not come to reduce(): they are averaged in full precision, or, if this
  // is false, added up. An algorithm whose result is neither a mean nor a sum says here what suits its step size.
  bool averagesSparse = true;
};

class Algorithm {
 public:
  Algorithm() = default;
  virtual ~Algorithm() = default;
  Algorithm(const Algorithm&) = delete;
  Algorithm& operator=(const Algorithm&) = delete;

  // Replaces the gradients of one bucket by what the optimizer is to see. It runs as a program on the executor of the
  // model's device, one bucket after another unless ReduceTraits::bucketsMayOverlap. Every rank issues the same calls
  // to the communicator. Gradients are dense, of any floating dtype; a rank that is alone has nothing to send, and
  // leaves them as they are.
  virtual void reduce(Bucket& bucket, Communicator& communicator) = 0;

  [[nodiscard]] virtual ReduceTraits traits() const { return {}; }

  // Where messages that it could code travel in full precision, because of how the ranks are spread over hosts: why,
  // and what to change, as whole sentences. Empty where they are coded, and where they never would be.
  [[nodiscard]] virtual std::string whyUncoded(const HostTopology& /*topology*/) const { return {}; }

  // One of algorithm_interfaces.h, if the algorithm has it, else null.
  template <class Interface>
  [[nodiscard]] Interface* as() {
    return dynamic_cast<Interface*>(this);
  }
  template <class Interface>
  [[nodiscard]] const Interface* as() const {
    return dynamic_cast<const Interface*>(this);
  }
};

// The ranks agree so far after a step, which decides which contract tests apply.
enum class Agreement {
  kIdentical,  // the same bits on every rank
  kEventual,   // ranks differ and are drawn together
};

// The registry knows this of an algorithm before one is created.
struct AlgorithmInfo {
  static constexpr const char* kKind = "algorithm";

  std::string name;
  std::string summary;
  // Listings follow this. No two have the same; those without one come last, in the order of their names.
  int position = kNoPosition;
  Agreement agreement = Agreement::kIdentical;
  // From one value that a gradient can arrive as to the next, as a share of the range (largest minus smallest value) of
  // what is coded together, with the default options: 1/255 with 8 bits. A coding is off by half of that at most, and
  // contract tests allow for two codings, one before the reduction and one after it.
  double relativeError = 1.0 / 255;
  // The class that the optimizer has to be of: "" where none is needed, "Optimizer" for any.
  std::string optimizer = {};
  // Something runs beside the steps: it needs a process group of its own, and no step may wait for another rank's but
  // through the algorithm, which has the interface RunsInBackground.
  bool runsInBackground = false;
  // Ranks may take different numbers of steps. Else an algorithm that runs in the background counts skipped ones.
  bool stepsMayDiffer = false;
  // Every rank computes by itself, by sums and products, what all are to hold alike: on a GPU their bits depend on its
  // kind and on torch's settings, which then have to be the same on all ranks.
  bool needsLikeDevices = false;
  std::vector<OptionInfo> options = {};
  std::function<std::unique_ptr<Algorithm>(const Options&)> create = {};
};

}  // namespace bagua

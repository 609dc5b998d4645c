// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/bucket.h"
#include "algorithms/options.h"
#include "algorithms/step_context.h"
#include "backend/communicator.h"

namespace bagua {

// What the ranks hold after a step; decides which contract tests apply.
enum class Agreement {
  kIdentical,  // the same bits on every rank
  kEventual,   // ranks differ and are drawn together
};

// Named tensors: what a checkpoint of one rank keeps of an algorithm.
using AlgorithmState = std::map<std::string, at::Tensor>;

// A number in a state, and back. counterOf throws ValueError where the state lacks it or holds no number from 0 on.
at::Tensor counterTensor(int64_t value);
int64_t counterOf(const AlgorithmState& state, const std::string& name);
// Throws ValueError where the state lacks it, or holds another number of elements or dtype than `like`.
at::Tensor tensorOf(const AlgorithmState& state, const std::string& name, const at::Tensor& like);
// Throws ValueError where the state holds what load() does not take: it would be lost without a word.
void checkThatAllAreTaken(const AlgorithmState& state, const std::function<bool(const std::string& name)>& isTaken);

// The momentum that the optimizer holds for a parameter, and the factor by which it decays.
struct Momentum {
  at::Tensor value;
  double decay = 0;
};

// What a model says of a parameter beside its tensor.
struct ParameterFacts {
  std::string name;
  // "embedding", "head" (of the last linear layer), or nothing.
  std::string role;
};

// One way to make the ranks of a data-parallel job agree. An instance serves one model.
//
// A training step is: beforeForward, reduce for every bucket, afterBackward, afterStep. reduce() runs as a program, in
// order unless bucketsMayOverlap(), on the executor of the model's device. The others run on the thread that trains,
// where they may submit programs and change weights; never two at a time. Every rank issues the same calls to the
// communicator.
class Algorithm {
 public:
  virtual ~Algorithm() = default;

  // Called once, before all else. Throws ValueError for a model that the algorithm cannot take.
  virtual void useModel(const StepContext& /*context*/) {}
  // Called once, after that. Throws ValueError where the ranks, as they are spread over hosts, cannot take part.
  virtual void useTopology(const HostTopology& /*topology*/) {}

  // By parameter, in the order of StepContext::parameters(). Called once, before the first step; not at all where the
  // model is not known.
  virtual void useParameters(const std::vector<ParameterFacts>& /*facts*/) {}

  // Throws ValueError where an option names what the model has not. `names`: of all its parameters, frozen ones too;
  // none where the model is not known.
  virtual void checkNames(const std::optional<std::vector<std::string>>& /*names*/) const {}

  // Whether the gradients of the step at hand travel. If not, the optimizer sees the rank's own.
  [[nodiscard]] virtual bool reducesGradients() const { return true; }
  // Replaces the gradients of one bucket by what the optimizer is to see. Dense, any floating dtype.
  virtual void reduce(Bucket& bucket, Communicator& communicator) = 0;
  // Whether gradients stay inside a host: reduce() is then called on a group of the ranks of one host. The same on all
  // ranks, and settled by useTopology().
  [[nodiscard]] virtual bool staysInHost() const { return false; }
  // Whether reduce() may run for two buckets at a time, on threads and communicators of their own, and they may end in
  // any order: only if it writes to nothing but its bucket and the state of the bucket's own parameters.
  [[nodiscard]] virtual bool bucketsMayOverlap() const { return false; }
  // reduce() keeps nothing: its bucket, and memory that it takes and drops, are all that it uses. On CUDA buckets
  // overlap only then, because torch's allocator would give memory that one stream has returned to that stream at once,
  // though a program on another may still read it.
  [[nodiscard]] virtual bool keepsNothing() const { return false; }
  // All steps are the same work on the same memory, so that a CUDA graph that holds one of them may be replayed
  // in place of others: nothing is kept from step to step, drawn at random, or chosen by the number of the step.
  [[nodiscard]] virtual bool isReplayable() const { return false; }
  // Whether the result is the mean over the ranks (else their sum). Sparse gradients, which no codec takes, are reduced
  // in full precision accordingly.
  [[nodiscard]] virtual bool averages() const { return true; }

  // Where messages that it could code travel in full precision, because of how the ranks are spread over hosts: why,
  // and what to change, as whole sentences. Empty where they are coded, and where they never would be.
  [[nodiscard]] virtual std::string whyUncoded(const HostTopology& /*topology*/) const { return {}; }

  // Sparse gradients that were reduced so: `values` is what the optimizer will see of them.
  virtual void endSparse(const at::Tensor& /*values*/, int64_t /*step*/) {}

  // How many steps it has taken, where all ranks have to have taken as many when they communicate; else 0. Ranks
  // compare it in every program, so that states of different steps are not mixed.
  [[nodiscard]] virtual int64_t commonStep() const { return 0; }
  // Whether what reduce() sends depends on Bucket::step, so that ranks have to compare that.
  [[nodiscard]] virtual bool sendsByStep() const { return false; }

  // The start of a forward whose backward will be synchronised.
  virtual void beforeForward(StepContext& /*context*/) {}
  // The end of a synchronised backward, when no gradient is outstanding.
  virtual void afterBackward(StepContext& /*context*/) {}
  // The end of the optimizer's step.
  virtual void afterStep(StepContext& /*context*/) {}
  // A step that was not taken: gradients have been dropped, as GradScaler has it done where they overflow. Only told to
  // algorithms that run in the background and whose ranks take the same number of steps.
  virtual void afterSkippedStep(StepContext& /*context*/) {}
  // As much of that as other ranks wait for and changes no weights, before a state is asked for; afterSkippedStep()
  // follows, perhaps in a run that has loaded the state.
  virtual void beginSkippedStep(StepContext& /*context*/) {}

  // By parameter, in the order of StepContext::parameters(); empty while the optimizer takes gradients. Only asked of
  // an algorithm that names QAdamOptimizer as its optimizer.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): those who override it keep it
  virtual void useMomenta(std::vector<Momentum> /*momenta*/) {}

  // Where ranks hold different weights: gives all of them the same, and goes on. Collective.
  virtual void synchronize(StepContext& /*context*/) {}
  // Stop and restart what runs in the background. Collective. Whether anything changed.
  virtual bool abort(StepContext& context);
  virtual bool resume(StepContext& context);
  // The end of a process that has not stopped it: ends it together with the ranks that come to the same within `limit`,
  // and throws where one does not. Nothing to do where all ranks have begun the same.
  virtual void endWithin(StepContext& /*context*/, std::chrono::milliseconds /*limit*/) {}
  // The last call: leaves a model that plain averaging of gradients can go on with. Collective.
  virtual void leave(StepContext& /*context*/) {}

  // Whether it remembers gradients, in their own scale, from step to step: rescale() multiplies what it remembers.
  // Between two steps.
  [[nodiscard]] virtual bool keepsResiduals() const { return false; }
  virtual void rescale(double /*factor*/) {}

  // Memory that it keeps between steps, beside the weights and what the optimizer has.
  [[nodiscard]] virtual int64_t stateBytes() const { return 0; }
  // Between two steps.
  [[nodiscard]] virtual AlgorithmState state() const { return {}; }
  // Throws ValueError for a state that does not fit the model.
  virtual void load(const AlgorithmState& state, StepContext& context);
};

struct AlgorithmInfo {
  static constexpr const char* kKind = "algorithm";

  std::string name;
  std::string summary;
  // Where the name stands in listings.
  int position = 0;
  Agreement agreement = Agreement::kIdentical;
  // Bound of what a gradient may be off, relative to the largest magnitude; as the default options are.
  double relativeError = 1.0 / 255;
  // The class that the optimizer has to be of: "" where none is needed, "Optimizer" for any.
  std::string optimizer = {};
  // Something runs beside the steps: it needs a process group of its own, and no step may wait for another rank's but
  // through the algorithm.
  bool runsInBackground = false;
  // Ranks may take different numbers of steps.
  bool stepsMayDiffer = false;
  // Every rank computes by itself, by sums and products, what all are to hold alike: on a GPU their bits depend on its
  // kind and on torch's settings, which then have to be the same on all ranks.
  bool needsLikeDevices = false;
  std::vector<OptionInfo> options;
  std::function<std::unique_ptr<Algorithm>(const Options&)> create;
};

}  // namespace bagua

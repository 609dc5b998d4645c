// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/bucket.h"
#include "algorithms/shared/guard/guard.h"
#include "algorithms/state.h"
#include "algorithms/step_context.h"
#include "backend/communicator.h"

// An algorithm may derive from these besides Algorithm. Unless they say otherwise, methods are called on the thread
// that trains, never two at a time.
namespace bagua {

// Remembers something from step to step.
class KeepsState {
 public:
  virtual ~KeepsState() = default;

  // Memory that it keeps between steps, beside the weights and what the optimizer has. Called from any thread, also
  // while a step is at work.
  [[nodiscard]] virtual int64_t stateBytes() const = 0;
  // Between two steps.
  [[nodiscard]] virtual AlgorithmState state() const = 0;
  // Throws ValueError for a state that does not fit the model, and then changes nothing.
  virtual void load(const AlgorithmState& state, StepContext& context) = 0;

  // Sparse gradients of a step, which were reduced beside reduce(), in the same order: `values` is what the optimizer
  // will see of them. For those whose state depends on whether the optimizer takes the step.
  virtual void endSparse(const at::Tensor& /*values*/, int64_t /*step*/) {}
};

// Remembers gradients, in their own scale, from step to step.
class KeepsResiduals {
 public:
  virtual ~KeepsResiduals() = default;

  // It remembers some, with its options and that optimizer. All ranks say the same.
  [[nodiscard]] virtual bool keepsAny() const = 0;
  // Multiplies what it remembers. Between two steps.
  virtual void rescale(double factor) = 0;
  // Called in the place of reduce(), in a step in which no rank has gradients of these parameters: what it remembers of
  // them stays. The flat tensor holds nothing.
  virtual void passOver(Bucket& bucket, Communicator& communicator) = 0;
  // After the last bucket of a step, when all are over, where the ranks of `communicator` hold gradients of different
  // parameters: they agree on whether the step was lost, of which some may have seen nothing.
  virtual void agreeOnStep(at::Device device, Communicator& communicator) = 0;
};

// Can give each rank its part of the mean alone, as sharded models take it.
class ReducesToParts {
 public:
  virtual ~ReducesToParts() = default;

  // This is Algorithm::reduce() for a flat tensor that holds a part for each rank, in the order of the ranks, with as
  // many entries of as many elements as the others. `own` becomes the mean of this rank's part. The flat tensor holds
  // anything then.
  virtual void reduceToParts(Bucket& bucket, at::Tensor& own, Communicator& communicator) = 0;
};

// Between which ranks gradients travel.
enum class GradientScope {
  kAllRanks,
  // reduce() is called on a group of the ranks of one host.
  kHost,
  // The optimizer sees the rank's own.
  kNone,
};

// Exchanges weights. A training step is: beforeForward(), reduce() for every bucket if gradients travel,
// afterBackward(), afterStep(). In these moments it may submit programs and change weights.
class ActsOnWeights {
 public:
  virtual ~ActsOnWeights() = default;

  // Called once, when the ranks have found that they registered the same, before all else. Throws ValueError, on all
  // ranks alike, for a model or a topology that it cannot take.
  virtual void useModel(const StepContext& /*context*/) {}

  // Of the step at hand. kHost is settled by useModel(), and the same on all ranks.
  [[nodiscard]] virtual GradientScope gradientScope() const { return GradientScope::kNone; }
  // How many steps it has taken, where all ranks have to have taken as many when they communicate; else 0. Ranks
  // compare it in every program, so that states of different steps are not mixed.
  [[nodiscard]] virtual int64_t commonStep() const = 0;

  // The start of a forward whose backward will be synchronised.
  virtual void beforeForward(StepContext& /*context*/) {}
  // The end of a synchronised backward, when no gradient is outstanding.
  virtual void afterBackward(StepContext& /*context*/) {}
  // The end of the optimizer's step.
  virtual void afterStep(StepContext& /*context*/) {}

  // Returns what is the same on all ranks of what it counts and remembers: as for KeepsState::load(), without what
  // belongs to one rank and what is on its way. When the group has other members, all of them go on from that of the
  // rank that has come furthest, with a new object whose useModel() knows them.
  [[nodiscard]] virtual AlgorithmState shared() const = 0;

  // Gives all ranks the same weights, from which plain averaging of gradients could go on, and goes on. Collective.
  virtual void synchronize(StepContext& context) = 0;
};

// Communicates beside the steps. Such an algorithm acts on weights, and AlgorithmInfo::runsInBackground says so.
class RunsInBackground {
 public:
  virtual ~RunsInBackground() = default;

  // Stop and restart what runs in the background. Collective. Whether anything changed.
  virtual bool abort(StepContext& context) = 0;
  virtual bool resume(StepContext& context) = 0;
  // The end of a process that has not stopped it: ends it together with the ranks that come to the same within `limit`,
  // and throws where one does not. Nothing to do where all ranks have begun the same.
  virtual void endWithin(StepContext& /*context*/, std::chrono::milliseconds /*limit*/) {}
};

// Has to be told of steps that were not taken, because gradients have been dropped, as GradScaler has it done where
// they overflow: its rounds are counted in steps that all ranks take alike.
class CountsSkippedSteps {
 public:
  virtual ~CountsSkippedSteps() = default;

  virtual void afterSkippedStep(StepContext& context) = 0;
  // As much of that as other ranks wait for and changes no weights, before a state is asked for; afterSkippedStep()
  // follows, perhaps in a run that has loaded the state.
  virtual void beginSkippedStep(StepContext& context) = 0;
};

// The momentum that the optimizer holds for a parameter, and the factor by which it decays.
struct Momentum {
  at::Tensor value;
  double decay = 0;
};

// Sends momenta in place of gradients. Its optimizer is QAdamOptimizer.
class UsesMomenta {
 public:
  virtual ~UsesMomenta() = default;

  // Before a forward. By parameter, in the order of StepContext::parameters(); empty while the optimizer takes
  // gradients.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): those who override it keep it
  virtual void useMomenta(std::vector<Momentum> momenta) = 0;
};

// What a model says of a parameter beside its tensor.
struct ParameterFacts {
  std::string name;
  // "embedding", "head" (of the last linear layer), or nothing.
  std::string role;
  // The whole parameter has so many, where parts of its gradient travel; 0 stands for as many as the gradient has.
  int64_t elements = 0;
};

// Codes gradients or differences of weights under guard, whose table the hook keeps in checkpoints.
class IsGuarded {
 public:
  virtual ~IsGuarded() = default;

  [[nodiscard]] virtual Guard& guard() = 0;
};

// Chooses something by the optimizer.
class ReadsOptimizer {
 public:
  virtual ~ReadsOptimizer() = default;

  // `isLinear`: whether its steps are linear in the gradients, as those of SGD are, also with momentum. Called once,
  // before the first step, and not at all where the optimizer is not known. It may change traits().
  virtual void useOptimizer(bool isLinear) = 0;
};

// Has options that name parameters of the model.
class ReadsNames {
 public:
  virtual ~ReadsNames() = default;

  // Throws ValueError where an option names what the model has not. `names`: of all its parameters, frozen ones too;
  // none where the model is not known.
  virtual void checkNames(const std::optional<std::vector<std::string>>& names) const = 0;
  // By parameter, in the order of StepContext::parameters(). Called once, before the first step; not at all where the
  // model is not known.
  virtual void useParameters(const std::vector<ParameterFacts>& facts) = 0;
};

}  // namespace bagua

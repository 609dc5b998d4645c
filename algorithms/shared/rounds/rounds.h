// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/algorithm.h"
#include "algorithms/algorithm_interfaces.h"
#include "algorithms/shared/rounds/fragments.h"
#include "algorithms/shared/rounds/measurement.h"
#include "algorithms/shared/rounds/outer_step.h"
#include "algorithms/shared/rounds/schedule.h"
#include "algorithms/shared/rounds/schedule_choice.h"
#include "algorithms/shared/weights.h"
#include "kernels/codec.h"

namespace bagua::rounds {

struct Settings {
  ScheduleOptions schedule;
  Pattern pattern = Pattern::kConsecutive;
  // What a rank keeps of its own weights when its fragment is synchronised.
  double mixing = 0;
  // Of the weights that an outer optimizer holds. Without one, weights are averaged as they are and nothing is held.
  std::optional<OuterOptions> outer = {};
  // Of the differences; null: full precision.
  const CodecInfo* codec = nullptr;
  bool errorFeedback = true;
  // Of what is coded.
  Guard::Mode guard = Guard::Mode::kOff;
  // Gradients are averaged inside a host, so that its ranks are one participant.
  bool hierarchical = false;
  // Whether floating-point buffers are averaged once a round.
  bool averageBuffers = false;
};

// Ranks train on their own and exchange their weights every so many steps, a fragment at a time, beside the training.
//
// A step is one of the optimizer, or one whose gradients were dropped after the backward. After the step at which a
// fragment is taken, its program begins: the mean over the ranks of (outer weights - weights), and the outer
// optimizer's step, all in the background. After the step at which it is synchronised, which waits for the program,
// the weights become mixing * weights + (1 - mixing) * outer weights. The outer weights and what the outer optimizer
// holds are the same bits on all ranks. What is left open of the schedule is chosen after the first steps, in which
// nothing is exchanged.
class Rounds final : public Algorithm,
                     public ActsOnWeights,
                     public RunsInBackground,
                     public CountsSkippedSteps,
                     public KeepsState,
                     public IsGuarded {
 public:
  // Throws ValueError.
  explicit Rounds(const Settings& settings);

  void useModel(const StepContext& context) override;
  [[nodiscard]] std::string whyUncoded(const HostTopology& topology) const override;

  // Gradients travel with `hierarchical`, where a host has several ranks.
  [[nodiscard]] GradientScope gradientScope() const override { return scope_; }
  void reduce(Bucket& bucket, Communicator& communicator) override;
  [[nodiscard]] ReduceTraits traits() const override { return {.bucketsMayOverlap = true}; }

  [[nodiscard]] int64_t commonStep() const override { return step_; }
  [[nodiscard]] Guard& guard() override { return *guard_; }

  void beforeForward(StepContext& context) override;
  void afterStep(StepContext& context) override;
  void afterSkippedStep(StepContext& context) override { afterStep(context); }
  void beginSkippedStep(StepContext& context) override { beginStep(context); }

  // Ends what is on its way, and synchronises at once all fragments that have taken steps since they were last. The
  // weights are then the outer ones, whatever the mixing.
  void synchronize(StepContext& context) override;
  bool abort(StepContext& context) override;
  bool resume(StepContext& context) override;

  [[nodiscard]] int64_t stateBytes() const override { return stateBytes_; }
  // Outer weights and their momentum; fragments on their way are dropped, and residuals with them.
  [[nodiscard]] AlgorithmState shared() const override;
  // Waits for what is on its way.
  [[nodiscard]] AlgorithmState state() const override;
  void load(const AlgorithmState& state, StepContext& context) override;

 private:
  // Weights of a fragment that are computed with in one dtype. Programs write to it, while nobody else looks.
  struct FragmentBucket {
    WeightBucket weights;
    at::ScalarType dtype;
    // Nothing is defined before the start, nor without an outer optimizer.
    OuterState outer;
    // Of error feedback; undefined where there is none.
    at::Tensor residual = {};
    at::Tensor ownerResidual = {};
  };
  using FragmentBuckets = std::vector<std::shared_ptr<FragmentBucket>>;
  // A fragment on its way.
  struct Exchange {
    // Null where it was over when a checkpoint was written.
    c10::intrusive_ptr<c10d::Work> work = {};
    // Means of the weights, where there is no outer optimizer.
    std::vector<at::Tensor> means = {};
    // Means of the buffers, with the last fragment of a round.
    std::vector<at::Tensor> buffers = {};
  };
  struct Fragment {
    FragmentBuckets buckets;
    std::optional<Exchange> exchange = {};
    // The step after which it was last synchronised; -1: never.
    int64_t synchronisedAfter = -1;
  };
  // What a checkpoint holds of a bucket.
  struct Loaded {
    OuterState outer;
    at::Tensor residual = {};
    at::Tensor ownerResidual = {};
  };

  [[nodiscard]] std::vector<std::vector<int64_t>> cut(const StepContext& context) const;
  // Measures until the schedule can be chosen. Steps that are skipped count, as ranks wait for each other here.
  void chooseInStep(StepContext& context);
  // An exchange like that of the longest fragment, whose result nobody uses.
  [[nodiscard]] c10::intrusive_ptr<c10d::Work> tryLine(StepContext& context,
                                                       std::shared_ptr<Measurement::End> end) const;
  // What follows from `measured`, shown in the statistics.
  void useChoice(StepContext& context);
  void makeFragments(const StepContext& context);
  void prepare(StepContext& context);
  void startOuterWeights(StepContext& context);
  void noteMemory(StepContext& context);
  void countState();
  // Where the differences of a fragment are, in the memory that all fragments share.
  std::vector<at::Tensor> roomFor(const Fragment& fragment);
  // In bytes, the parts of each dtype in whole units of so many.
  [[nodiscard]] int64_t longestFragment(int64_t unit) const;
  [[nodiscard]] bool isCoded() const;
  // The elements of a bucket that this rank owns in a coded exchange.
  [[nodiscard]] int64_t ownedOf(const FragmentBucket& bucket, int rank) const;
  void allocate(FragmentBucket& bucket, int rank) const;
  // Counts a step, and takes the fragment that is to be taken after it; once, however often it is called for a step.
  void beginStep(StepContext& context);
  void take(int64_t number, StepContext& context);
  void synchronise(int64_t number, StepContext& context);
  [[nodiscard]] FragmentBuckets allBuckets() const;
  [[nodiscard]] std::vector<Fragment> loadedFragments(const AlgorithmState& state, bool hasStarted) const;
  [[nodiscard]] Loaded loadedBucket(const AlgorithmState& state, size_t number, const FragmentBucket& bucket,
                                    const StepContext& context) const;

  const Settings settings_;
  // A program that is abandoned may outlive us.
  const std::shared_ptr<Guard> guard_;
  // None until it is chosen.
  std::optional<Schedule> schedule_;
  Measurement measurement_;
  // What the schedule was chosen by, and after which step; none where the user said all of it.
  std::optional<Measured> measured_;
  int64_t chosenAfter_ = 0;
  // The participants as hosts.
  std::optional<HostTopology> topology_;
  GradientScope scope_ = GradientScope::kNone;
  std::vector<Fragment> fragments_;
  std::vector<WeightBucket> buffers_;
  // As many bytes as the longest fragment has, for the differences of the one that is on its way. Undefined before the
  // first, and without an outer optimizer.
  at::Tensor room_;
  // What is kept between steps, for any thread that asks.
  std::atomic<int64_t> stateBytes_ = 0;
  // Whether the outer weights are there.
  bool hasStarted_ = false;
  bool isPaused_ = false;
  int64_t step_ = 0;
  // Whether the last step of these has begun and is not over.
  bool isInStep_ = false;
};

}  // namespace bagua::rounds

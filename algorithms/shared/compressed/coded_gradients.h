// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "algorithms/algorithm.h"
#include "algorithms/algorithm_interfaces.h"
#include "algorithms/shared/compressed/coding_look.h"
#include "algorithms/shared/compressed/feedback.h"
#include "algorithms/shared/compressed/feedback_choice.h"
#include "algorithms/shared/compressed/mean.h"
#include "algorithms/shared/compressed/sections.h"
#include "algorithms/shared/compressed/selection.h"
#include "algorithms/shared/guard/guard.h"

namespace bagua::compressed {

struct CodedGradientsOptions {
  MeanOptions mean;
  // Gradients travel in full precision before it.
  int64_t startStep = 0;
  Rounding rounding = Rounding::kNearest;
  FeedbackChoice feedback = FeedbackChoice(false);
  bool hasSmallResiduals = false;
};

// Mean of the gradients with coded messages, under guard. The gradients of a bucket that are to stay exact, or that
// another codec takes, travel in the same messages. Where a bucket holds a part for each rank, all parts of a gradient
// are coded alike, and the guard knows them by the first one.
class CodedGradients : public Algorithm, public KeepsState, public ReducesToParts, public ReadsNames, public IsGuarded {
 public:
  CodedGradients(Selection selection, CodedGradientsOptions options, Guard::Mode guard)
      : guard_(guard),
        selection_(std::move(selection)),
        options_(std::move(options)),
        feedback_(options_.hasSmallResiduals),
        hasFeedback_(isFeedbackOnForAny()) {}

  void useParameters(const std::vector<ParameterFacts>& facts) override { selection_.useParameters(facts); }
  void checkNames(const std::optional<std::vector<std::string>>& names) const override { selection_.checkNames(names); }
  [[nodiscard]] Guard& guard() override { return guard_; }

  void reduce(Bucket& bucket, Communicator& communicator) override;
  void reduceToParts(Bucket& bucket, at::Tensor& own, Communicator& communicator) override;
  void endSparse(const at::Tensor& values, int64_t step) override;

  [[nodiscard]] ReduceTraits traits() const override;
  [[nodiscard]] std::string whyUncoded(const HostTopology& topology) const override {
    return compressed::whyUncoded(options_.mean, topology);
  }
  [[nodiscard]] int64_t stateBytes() const override { return feedback_.bytes(); }
  [[nodiscard]] AlgorithmState state() const override { return feedback_.state(); }
  void load(const AlgorithmState& state, StepContext& context) override { feedback_.load(state, context.parameters()); }

 protected:
  // For those that have the interface KeepsResiduals.
  [[nodiscard]] bool hasFeedback() const { return hasFeedback_; }
  void rescaleResiduals(double factor) { feedback_.rescale(factor); }
  void passOverResiduals(Bucket& bucket, Communicator& communicator);
  void agreeOnResiduals(at::Device device, Communicator& communicator) {
    if (hasFeedback_) feedback_.agreeOnStep(device, communicator);
  }
  // See FeedbackChoice; before the first step.
  void chooseFeedback(bool isOptimizerLinear) {
    options_.feedback.useOptimizer(isOptimizerLinear);
    hasFeedback_ = isFeedbackOnForAny();
  }

 private:
  // The sections of a bucket and how they are coded: a sum for each, and others behind them.
  struct Coded {
    // Of the bucket, which may be in parts.
    MeanOptions mean;
    std::vector<CodecSection> sections;
    std::vector<Sum> sums;
  };
  // By the place of the section.
  using Looks = std::map<size_t, CodingLook>;

  [[nodiscard]] bool isExactIn(const Bucket& bucket, const Communicator& communicator) const {
    return bucket.step < options_.startStep || !isCoded(options_.mean, communicator.topology());
  }
  // Before all else of a bucket that is coded, whose parts are in the order of lanes then. No sums yet.
  Coded begin(Bucket& bucket, const Communicator& communicator);
  void addSums(const Bucket& bucket, Coded& coded, const Communicator& communicator);
  [[nodiscard]] Looks lookAt(Bucket& bucket, const Coded& coded, const Communicator& communicator) const;
  // After the sums have travelled, but for the end of the step.
  void keepResiduals(Bucket& bucket, const Coded& coded, const Communicator& communicator);

  [[nodiscard]] std::vector<CodecSection> divide(const Bucket& bucket, int parts) const;
  [[nodiscard]] Coding codingOf(const Bucket& bucket, const CodecSection& section, const MeanOptions& mean,
                                const Communicator& communicator);
  void forgetOthers(const Coded& coded, const Communicator& communicator) const;
  void keepUnused(const Bucket& bucket, const Coded& coded, const Communicator& communicator) const;

  // Also for those to which the guard may raise a gradient.
  [[nodiscard]] bool isFeedbackOnForAny() const;
  [[nodiscard]] bool keepsResidualsOf(const CodecSection& section) const;
  [[nodiscard]] Rounding roundingWith(const Codec& codec) const {
    return codec.canRoundStochastically() ? options_.rounding : Rounding::kNearest;
  }

  Guard guard_;
  Selection selection_;
  CodedGradientsOptions options_;
  Feedback feedback_;
  bool hasFeedback_ = false;
};

}  // namespace bagua::compressed

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "algorithms/algorithm.h"
#include "algorithms/algorithm_interfaces.h"
#include "algorithms/shared/compressed/feedback.h"
#include "algorithms/shared/compressed/feedback_choice.h"
#include "algorithms/shared/compressed/mean.h"
#include "algorithms/shared/compressed/sections.h"
#include "algorithms/shared/compressed/selection.h"
#include "algorithms/shared/guard/guard.h"

namespace bagua::compressed {

struct CodedGradientsOptions {
  MeanOptions mean;
  // In full precision before it.
  int64_t startStep = 0;
  Rounding rounding = Rounding::kNearest;
  FeedbackChoice feedback = FeedbackChoice(false);
  bool hasSmallResiduals = false;
};

// Mean of the gradients with coded messages, under guard. The gradients of a bucket that are to stay exact, or that
// another codec takes, travel in the same messages.
class CodedGradients : public Algorithm, public KeepsState, public ReadsNames, public IsGuarded {
 public:
  CodedGradients(Selection selection, CodedGradientsOptions options, Guard::Mode guard)
      : guard_(guard),
        selection_(std::move(selection)),
        options_(std::move(options)),
        feedback_(options_.hasSmallResiduals),
        hasFeedback_(isFeedbackOnForAny()) {}

  void useParameters(const std::vector<ParameterFacts>& facts) override { selection_.useParameters(facts); }
  void checkNames(const std::optional<std::vector<std::string>>& names) const override { selection_.checkNames(names); }
  [[nodiscard]] const Guard& guard() const override { return guard_; }
  void useNames(std::vector<std::string> names) override { guard_.useNames(std::move(names)); }

  void reduce(Bucket& bucket, Communicator& communicator) override;
  void endSparse(const at::Tensor& values, int64_t step) override;

  [[nodiscard]] ReduceTraits traits() const override;
  [[nodiscard]] std::string whyUncoded(const HostTopology& topology) const override {
    return compressed::whyUncoded(options_.mean, topology);
  }
  [[nodiscard]] int64_t stateBytes() const override { return feedback_.bytes(); }
  [[nodiscard]] AlgorithmState state() const override;
  void load(const AlgorithmState& state, StepContext& context) override;

 protected:
  Feedback& feedback() { return feedback_; }
  // See FeedbackChoice; before the first step.
  void chooseFeedback(bool isOptimizerLinear) {
    options_.feedback.useOptimizer(isOptimizerLinear);
    hasFeedback_ = isFeedbackOnForAny();
  }

 private:
  [[nodiscard]] std::vector<CodecSection> divide(const Bucket& bucket) const;
  [[nodiscard]] Coding codingOf(const Bucket& bucket, const CodecSection& section, const Communicator& communicator);
  void forgetOthers(const std::vector<CodecSection>& sections, const Sum& first,
                    const Communicator& communicator) const;
  void keepUnused(const Bucket& bucket, const std::vector<CodecSection>& sections, const std::vector<Sum>& sums,
                  const Communicator& communicator) const;
  void keepResiduals(Bucket& bucket, const std::vector<CodecSection>& sections, const std::vector<Sum>& sums,
                     const Communicator& communicator);

  [[nodiscard]] bool isFeedbackOnForAny() const;
  [[nodiscard]] bool keepsResidualsOf(const CodecSection& section) const;
  [[nodiscard]] Rounding roundingWith(const Codec& codec) const {
    return codec.canRoundStochastically() ? options_.rounding : Rounding::kNearest;
  }

  // Gives verdicts when it is asked for its state.
  mutable Guard guard_;
  Selection selection_;
  CodedGradientsOptions options_;
  Feedback feedback_;
  bool hasFeedback_ = false;
};

}  // namespace bagua::compressed

// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/powersgd/matrices.h"
#include "algorithms/powersgd/mean_look.h"
#include "algorithms/powersgd/starting_factors.h"
#include "algorithms/registry.h"
#include "algorithms/shared/compressed/mean.h"
#include "algorithms/shared/compressed/step_sets.h"
#include "algorithms/shared/compressed/unused.h"
#include "algorithms/shared/parameter_state.h"
#include "kernels/codecs/raw/raw_codec.h"
#include "kernels/loops/low_rank/matrix_batch.h"
#include "kernels/loops/low_rank/orthogonalize.h"

namespace bagua {
namespace {

using powersgd::Division;
using powersgd::MatrixGroup;

// The guard looks at two of so many steps: a training that diverges does so in a few steps.
constexpr int64_t kGuardWindow = 4;

struct PowerSgdOptions {
  powersgd::Worth worth;
  int64_t startStep = 0;
  bool hasErrorFeedback = true;
  bool isWarm = true;
  bool isHierarchical = false;
  int64_t seed = 0;
  std::string codec;
};

// Mean of the gradients, of which each matrix travels as two thin factors; what they leave out is added to the next
// step's gradient.
class PowerSgd final : public Algorithm, public KeepsState, public KeepsResiduals, public IsGuarded {
 public:
  PowerSgd(PowerSgdOptions options, Guard::Mode guard)
      : guard_(guard),
        options_(std::move(options)),
        residuals_{ParameterState("residual"), ParameterState("residual")},
        starts_{{options_.isWarm, options_.seed}, {options_.isWarm, options_.seed}} {
    TORCH_CHECK_VALUE(options_.worth.rank >= 1, "bagua: rank must be at least 1, got ", options_.worth.rank);
    TORCH_CHECK_VALUE(options_.worth.minCompression > 0 && std::isfinite(options_.worth.minCompression),
                      "bagua: min_compression must be positive, got ", options_.worth.minCompression);
    TORCH_CHECK_VALUE(
        options_.hasErrorFeedback || !guard_.adapts(),
        "bagua: guard='adapt' of algorithm 'powersgd' needs error_feedback=True: without it no product is "
        "further from the mean than zeros are, and nothing would ever adapt");
    if (!options_.codec.empty()) coding_ = compressed::Coding{.codec = CodecRegistry::find(options_.codec).codec};
  }

  void reduce(Bucket& bucket, Communicator& communicator) override {
    if (bucket.flat.numel() == 0 || communicator.size() == 1) return;
    const bool isExact = isExactIn(bucket, communicator);
    if (!isExact) begin(bucket, communicator);
    const Division division = isExact ? Division{} : divide(bucket);
    if (!division.groups.empty()) return reduceByFactors(bucket, division, communicator);
    compressed::reduceExactly(bucket.flat, {}, bucket.seconds, communicator);
    if (!isExact) steps_.noteResult(bucket.flat);
  }

  void endSparse(const at::Tensor& values, int64_t step) override {
    steps_.begin(step);
    steps_.noteResult(values);
  }

  [[nodiscard]] ReduceTraits traits() const override { return {.bucketsMayOverlap = true, .sendsByStep = true}; }
  [[nodiscard]] std::string whyUncoded(const HostTopology& topology) const override {
    return compressed::whyUncoded({.hierarchical = options_.isHierarchical}, topology);
  }

  [[nodiscard]] Guard& guard() override { return guard_; }
  void passOver(Bucket& bucket, Communicator& communicator) override {
    if (communicator.size() == 1 || isExactIn(bucket, communicator)) return;
    begin(bucket, communicator);
    const Division division = divide(bucket);
    if (division.groups.empty()) return;
    if (options_.hasErrorFeedback) {
      const at::Tensor residuals = residuals_[steps_.current()].flatFor(bucket, division.matrices);
      at::Tensor nextResiduals = residuals_[steps_.next()].flatFor(bucket, division.matrices);
      steps_.restoreIfLost(residuals, nextResiduals);
      nextResiduals.copy_(residuals);
    }
    const auto options = bucket.flat.options().dtype(low_rank::MatrixBatch::factorType(bucket.flat.scalar_type()));
    for (const auto& group : division.groups) {
      starts_[steps_.next()].keep(group, startOf(group, bucket, options), *bucket.retained);
    }
    steps_.noteWritten();
  }

  // Also without error feedback it has the factors of the last step.
  [[nodiscard]] bool keepsAny() const override { return true; }
  void agreeOnStep(at::Device device, Communicator& communicator) override { steps_.agree(device, communicator); }

  // Factors are made orthonormal, so that theirs does not matter.
  void rescale(double factor) override {
    for (auto& residuals : residuals_) residuals.rescale(factor);
  }

  [[nodiscard]] int64_t stateBytes() const override {
    return residuals_[0].bytes() + residuals_[1].bytes() + starts_[0].bytes() + starts_[1].bytes();
  }

  [[nodiscard]] AlgorithmState state() const override {
    const int set = steps_.betweenSteps();
    AlgorithmState state = residuals_[set].state();
    state.merge(starts_[set].state());
    return state;
  }

  void load(const AlgorithmState& state, StepContext& context) override {
    ParameterState residuals("residual");
    checkThatAllAreTaken(state, [&](const std::string& name) {
      return residuals.takes(name, state) || powersgd::StartingFactors::isName(name);
    });
    residuals.load(state, context.parameters());
    starts_[0].load(state, context.parameters(), options_.worth);
    residuals_[0].load(state, context.parameters());
    residuals_[1].load({}, {});
    starts_[1].load({}, {}, options_.worth);
    steps_.reset();
  }

 private:
  [[nodiscard]] bool isExactIn(const Bucket& bucket, const Communicator& communicator) const {
    return bucket.step < options_.startStep ||
           !compressed::isCoded({.hierarchical = options_.isHierarchical}, communicator.topology());
  }

  // The matrices of one shape at work.
  struct Work {
    const MatrixGroup* group;
    std::vector<at::Tensor> gradients;
    // By matrix, where they are kept: what is read and what is written.
    std::vector<at::Tensor> residuals;
    std::vector<at::Tensor> nextResiduals;
    low_rank::MatrixBatch batch;
    // Before it was made orthonormal.
    at::Tensor start;
    // Views of the messages.
    at::Tensor p;
    at::Tensor q;
  };

  // A matrix that the guard has made exact begins with nothing when it is compressed again.
  void begin(const Bucket& bucket, const Communicator& communicator) {
    steps_.begin(bucket.step);
    const auto changed = guard_.begin(bucket, communicator.rank());
    if (changed.empty()) return;
    for (auto& residuals : residuals_) residuals.forget(changed, *bucket.retained);
    for (auto& starts : starts_) starts.forget(changed, *bucket.retained);
  }

  [[nodiscard]] Division divide(const Bucket& bucket) const {
    if (!guard_.isAnyRaised()) return powersgd::divide(bucket, options_.worth);
    return powersgd::divide(bucket, options_.worth,
                            [this](int64_t parameter) { return guard_.levelOf(parameter) > 0; });
  }

  static std::vector<at::Tensor> gradientsOf(const std::vector<Work>& works) {
    std::vector<at::Tensor> all;
    for (const auto& work : works) all.insert(all.end(), work.gradients.begin(), work.gradients.end());
    return all;
  }
  static std::vector<at::Tensor> residualsOf(const std::vector<Work>& works) {
    std::vector<at::Tensor> all;
    for (const auto& work : works) all.insert(all.end(), work.residuals.begin(), work.residuals.end());
    return all;
  }

  void reduceByFactors(Bucket& bucket, const Division& division, Communicator& communicator) {
    const auto options = bucket.flat.options().dtype(low_rank::MatrixBatch::factorType(bucket.flat.scalar_type()));
    const auto [pElements, qElements] = powersgd::factorElements(division);
    // P, behind it the gradients that travel as they are, and which parameters are used.
    const int64_t exactElements = powersgd::elementsIn(division.exact);
    const auto uses = bucket.tellsUse ? static_cast<int64_t>(bucket.entries.size()) : 0;
    const bool isLookedAt = guard_.keyOfLook(bucket, options_.startStep, kGuardWindow).has_value();
    const int64_t lookElements = isLookedAt ? powersgd::elementsOfLook(division) : 0;
    at::Tensor first = at::empty({pElements + exactElements + uses + lookElements}, options);
    const at::Tensor exact = first.narrow(0, pElements, exactElements);
    const at::Tensor areUsed = first.narrow(0, pElements + exactElements, uses);
    const at::Tensor looked = first.narrow(0, pElements + exactElements + uses, lookElements);
    at::Tensor second = at::empty({qElements}, options);
    std::vector<Work> works = worksOf(bucket, division, first, second);
    if (isLookedAt) {
      const Stage stage(bucket.seconds, stages::kGuard);
      looked.copy_(powersgd::lookAt(gradientsOf(works), residualsOf(works)));
    }
    {
      const Stage stage(bucket.seconds, stages::kMultiply);
      for (auto& work : works) {
        low_rank::orthogonalize(work.q);
        work.batch.multiply(work.q, work.p);
      }
      powersgd::copyExact(bucket, division, exact, true);
      if (bucket.tellsUse) areUsed.copy_(compressed::usedByThisRank(bucket, first.scalar_type()));
    }
    reduceFirst(first, pElements, bucket, communicator);
    at::Tensor areUsable = at::isfinite(first.narrow(0, 0, first.numel() - lookElements)).all();
    {
      const Stage stage(bucket.seconds, stages::kMultiplyTransposed);
      for (auto& work : works) {
        low_rank::orthogonalize(work.p);
        work.batch.multiplyTransposed(work.p, work.q);
      }
    }
    reduceFactors(second, stages::kAllReduceQ, bucket.seconds, communicator);
    areUsable.logical_and_(at::isfinite(second).all());
    {
      const Stage stage(bucket.seconds, stages::kReplace);
      powersgd::copyExact(bucket, division, exact, false);
      for (auto& work : works) {
        work.batch.replace(work.p, work.q, areUsable);
        at::Tensor q = at::where(areUsable, work.q, work.start);
        if (bucket.tellsUse) keepUnused(bucket, areUsed, work, q);
        starts_[steps_.next()].keep(*work.group, q, *bucket.retained);
      }
    }
    if (isLookedAt) {
      const Stage stage(bucket.seconds, stages::kGuard);
      powersgd::tell(guard_, bucket.step, division, options_.worth.rank, looked, gradientsOf(works));
    }
    const Stage stage(bucket.seconds, stages::kReplace);
    if (bucket.tellsUse) compressed::clearUnused(bucket, areUsed);
    steps_.noteWritten();
    noteResult(bucket, areUsable, second);
  }

  // No product of the factors is larger than the sum of the magnitudes of a row of Q, as the columns of P are
  // orthonormal: where those are finite there is no need to look at all gradients, unless they are rounded to 16 bits.
  void noteResult(const Bucket& bucket, const at::Tensor& areUsable, const at::Tensor& q) {
    if (bucket.flat.element_size() < 4) return steps_.noteResult(bucket.flat);
    const at::Tensor bounds = q * static_cast<double>(2 * options_.worth.rank);
    steps_.noteWhetherFinite(at::isfinite(bounds).all().logical_and_(areUsable));
  }

  // What no rank has used leaves no trace.
  static void keepUnused(const Bucket& bucket, const at::Tensor& areUsed, const Work& work, at::Tensor& q) {
    for (size_t i = 0; i < work.group->matrices.size(); ++i) {
      const int64_t parameter = work.group->matrices[i].parameter;
      const auto entry = std::find_if(bucket.entries.begin(), bucket.entries.end(),
                                      [&](const BucketEntry& one) { return one.parameter == parameter; });
      const at::Tensor isUsed = areUsed.select(0, entry - bucket.entries.begin());
      const auto place = static_cast<int64_t>(i);
      compressed::replaceUnlessUsed(q.select(0, place), isUsed, work.start.select(0, place));
      if (work.residuals.empty()) continue;
      compressed::replaceUnlessUsed(work.nextResiduals[i], isUsed, work.residuals[i]);
    }
  }

  std::vector<Work> worksOf(const Bucket& bucket, const Division& division, const at::Tensor& first,
                            const at::Tensor& second) {
    const int current = steps_.current();
    at::Tensor residuals;
    at::Tensor nextResiduals;
    if (options_.hasErrorFeedback) {
      residuals = residuals_[current].flatFor(bucket, division.matrices);
      nextResiduals = residuals_[1 - current].flatFor(bucket, division.matrices);
      steps_.restoreIfLost(residuals, nextResiduals);
    }
    std::vector<Work> works;
    int64_t pBegin = 0;
    int64_t qBegin = 0;
    for (const auto& group : division.groups) {
      const auto [rows, columns, rank] = group.shape;
      const auto count = static_cast<int64_t>(group.matrices.size());
      const std::vector<at::Tensor> gradients = powersgd::matricesOf(bucket, group);
      std::vector<at::Tensor> ofGradients;
      std::vector<at::Tensor> nextOfGradients;
      for (const auto& matrix : group.matrices) {
        const int64_t length = matrix.elements.end - matrix.elements.begin;
        if (!residuals.defined()) continue;
        const int64_t place = powersgd::placeIn(division.matrices, matrix.elements.begin);
        ofGradients.push_back(residuals.narrow(0, place, length).view({rows, columns}));
        nextOfGradients.push_back(nextResiduals.narrow(0, place, length).view({rows, columns}));
      }
      const at::Tensor p = first.narrow(0, pBegin, count * rank * rows).view({count, rank, rows});
      const at::Tensor q = second.narrow(0, qBegin, count * rank * columns).view({count, rank, columns});
      pBegin += p.numel();
      qBegin += q.numel();
      const at::Tensor start = startOf(group, bucket, second.options());
      q.copy_(start);
      works.push_back({.group = &group,
                       .gradients = gradients,
                       .residuals = ofGradients,
                       .nextResiduals = nextOfGradients,
                       .batch = {gradients, ofGradients, nextOfGradients},
                       .start = start,
                       .p = p,
                       .q = q});
    }
    return works;
  }

  at::Tensor startOf(const MatrixGroup& group, const Bucket& bucket, const at::TensorOptions& options) {
    const int current = steps_.current();
    const at::Tensor start = starts_[current].startOf(group, bucket.step, options);
    if (!options_.isWarm || !steps_.wasLost().defined()) return start;
    steps_.restoreIfLost(start, starts_[1 - current].startOf(group, bucket.step, options));
    starts_[current].keep(group, start, *bucket.retained);
    return start;
  }

  void reduceFirst(at::Tensor& message, int64_t pElements, Bucket& bucket, Communicator& communicator) const {
    at::Tensor factors = message.narrow(0, 0, coding_ ? pElements : message.numel());
    at::Tensor rest = message.narrow(0, factors.numel(), message.numel() - factors.numel());
    if (rest.numel() == 0) return reduceFactors(factors, stages::kAllReduceP, bucket.seconds, communicator);
    std::vector<compressed::Sum> sums = {{factors, *coding_}, {rest, {.codec = rawCodec(rest.scalar_type())}}};
    static_cast<void>(compressed::reduceToMeans(sums, meanOptions(communicator), bucket.seconds, communicator));
  }

  static compressed::MeanOptions meanOptions(const Communicator& communicator) {
    return {.hierarchical = communicator.topology().hostCount() > 1};
  }

  void reduceFactors(at::Tensor& factors, const char* name, StageSeconds& seconds, Communicator& communicator) const {
    if (coding_) {
      return compressed::reduceToMean(factors, meanOptions(communicator), *coding_, seconds, communicator);
    }
    const Stage stage(seconds, name);
    communicator.allReduce(factors, c10d::ReduceOp::AVG);
  }

  Guard guard_;
  const PowerSgdOptions options_;
  std::optional<compressed::Coding> coding_;
  compressed::StepSets steps_;
  ParameterState residuals_[2];
  powersgd::StartingFactors starts_[2];
};

}  // namespace

BAGUA_REGISTER_ALGORITHM({
    .name = "powersgd",
    .summary = "Mean of the gradients, whose matrices travel as products of two thin factors.",
    .position = 7,
    .agreement = Agreement::kIdentical,
    .needsLikeDevices = true,
    .options = {{"rank", int64_t{4}, "Columns of the factors, and so the rank of what arrives."},
                {"start_step", int64_t{1000}, "Full precision before this step."},
                {"error_feedback", true, "What the factors leave out is added to the next step's gradient."},
                {"warm_start", true, "Each step starts from the factor of the last one; False: from a random one."},
                {"min_compression", 2.0,
                 "A gradient has to be more than this many times larger than its factors, or travels as it is."},
                {"hierarchical", false,
                 "True: on a single host nothing is compressed. Between hosts there is no difference: sums of factors "
                 "are what factors of sums are, and each byte leaves a host once."},
                {"codec", std::string(), "One of available_codecs(), for the factors; None: full precision."},
                {"seed", int64_t{0}, "Of the random factors."},
                Guard::option()},
    .create =
        [](const Options& options) {
          const PowerSgdOptions own{
              .worth = {.rank = options.get<int64_t>("rank"), .minCompression = options.get<double>("min_compression")},
              .startStep = compressed::startStepOf(options),
              .hasErrorFeedback = options.get<bool>("error_feedback"),
              .isWarm = options.get<bool>("warm_start"),
              .isHierarchical = options.get<bool>("hierarchical"),
              .seed = options.get<int64_t>("seed"),
              .codec = options.get<std::string>("codec")};
          return std::make_unique<PowerSgd>(own, Guard::modeOf(options));
        },
})

}  // namespace bagua

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
class PowerSgd final : public Algorithm, public KeepsState, public KeepsResiduals {
 public:
  explicit PowerSgd(PowerSgdOptions options)
      : options_(std::move(options)),
        residuals_{ParameterState("residual"), ParameterState("residual")},
        starts_{{options_.isWarm, options_.seed}, {options_.isWarm, options_.seed}} {
    TORCH_CHECK_VALUE(options_.worth.rank >= 1, "bagua: rank must be at least 1, got ", options_.worth.rank);
    TORCH_CHECK_VALUE(options_.startStep >= 0, "bagua: start_step must be at least 0, got ", options_.startStep);
    TORCH_CHECK_VALUE(options_.worth.minCompression > 0 && std::isfinite(options_.worth.minCompression),
                      "bagua: min_compression must be positive, got ", options_.worth.minCompression);
    if (!options_.codec.empty()) coding_ = compressed::Coding{.codec = CodecRegistry::find(options_.codec).codec};
  }

  void reduce(Bucket& bucket, Communicator& communicator) override {
    if (bucket.flat.numel() == 0 || communicator.size() == 1) return;
    const bool isExact = isExactIn(bucket, communicator);
    if (!isExact) steps_.begin(bucket.step);
    const Division division = isExact ? Division{} : powersgd::divide(bucket, options_.worth);
    if (!division.groups.empty()) return reduceByFactors(bucket, division, communicator);
    {
      const Stage stage(bucket.seconds, stages::kAllReduce);
      communicator.allReduce(bucket.flat, c10d::ReduceOp::AVG);
    }
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

  void passOver(Bucket& bucket, Communicator& communicator) override {
    if (communicator.size() == 1 || isExactIn(bucket, communicator)) return;
    steps_.begin(bucket.step);
    const Division division = powersgd::divide(bucket, options_.worth);
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

  void reduceByFactors(Bucket& bucket, const Division& division, Communicator& communicator) {
    const auto options = bucket.flat.options().dtype(low_rank::MatrixBatch::factorType(bucket.flat.scalar_type()));
    const auto [pElements, qElements] = elementsOf(division);
    // P, behind it the gradients that travel as they are, and which parameters are used.
    const int64_t exactElements = elementsOf(division.exact);
    const auto uses = bucket.tellsUse ? static_cast<int64_t>(bucket.entries.size()) : 0;
    at::Tensor first = at::empty({pElements + exactElements + uses}, options);
    const at::Tensor exact = first.narrow(0, pElements, exactElements);
    const at::Tensor areUsed = first.narrow(0, pElements + exactElements, uses);
    at::Tensor second = at::empty({qElements}, options);
    std::vector<Work> works = begin(bucket, division, first, second);
    {
      const Stage stage(bucket.seconds, stages::kMultiply);
      for (auto& work : works) {
        low_rank::orthogonalize(work.q);
        work.batch.multiply(work.q, work.p);
      }
      copyExact(bucket, division, exact, true);
      if (bucket.tellsUse) areUsed.copy_(compressed::usedByThisRank(bucket, first.scalar_type()));
    }
    reduceFirst(first, pElements, bucket, communicator);
    at::Tensor areUsable = at::isfinite(first).all();
    {
      const Stage stage(bucket.seconds, stages::kMultiplyTransposed);
      for (auto& work : works) {
        low_rank::orthogonalize(work.p);
        work.batch.multiplyTransposed(work.p, work.q);
      }
    }
    reduceFactors(second, stages::kAllReduceQ, bucket.seconds, communicator);
    areUsable.logical_and_(at::isfinite(second).all());
    const Stage stage(bucket.seconds, stages::kReplace);
    copyExact(bucket, division, exact, false);
    for (auto& work : works) {
      work.batch.replace(work.p, work.q, areUsable);
      at::Tensor q = at::where(areUsable, work.q, work.start);
      if (bucket.tellsUse) keepUnused(bucket, areUsed, work, q);
      starts_[steps_.next()].keep(*work.group, q, *bucket.retained);
    }
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

  std::vector<Work> begin(const Bucket& bucket, const Division& division, const at::Tensor& first,
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
      std::vector<at::Tensor> gradients;
      std::vector<at::Tensor> ofGradients;
      std::vector<at::Tensor> nextOfGradients;
      for (const auto& matrix : group.matrices) {
        const int64_t length = matrix.elements.end - matrix.elements.begin;
        gradients.push_back(bucket.flat.narrow(0, matrix.elements.begin, length).view({rows, columns}));
        if (!residuals.defined()) continue;
        const int64_t place = placeIn(division.matrices, matrix.elements.begin);
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
                       .residuals = ofGradients,
                       .nextResiduals = nextOfGradients,
                       .batch = {std::move(gradients), ofGradients, nextOfGradients},
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

  static std::pair<int64_t, int64_t> elementsOf(const Division& division) {
    int64_t p = 0;
    int64_t q = 0;
    for (const auto& [shape, matrices] : division.groups) {
      p += static_cast<int64_t>(matrices.size()) * shape.rank * shape.rows;
      q += static_cast<int64_t>(matrices.size()) * shape.rank * shape.columns;
    }
    return {p, q};
  }

  static int64_t elementsOf(const std::vector<Piece>& pieces) {
    int64_t elements = 0;
    for (const auto& piece : pieces) elements += piece.end - piece.begin;
    return elements;
  }

  // Of an element of the bucket, among those of `pieces`.
  static int64_t placeIn(const std::vector<Piece>& pieces, int64_t element) {
    int64_t place = 0;
    for (const auto& piece : pieces) {
      if (element < piece.end) return place + element - piece.begin;
      place += piece.end - piece.begin;
    }
    TORCH_INTERNAL_ASSERT(false, "no matrix has element ", element);
  }

  // The gradients that travel as they are, into the message or from there.
  static void copyExact(const Bucket& bucket, const Division& division, const at::Tensor& message, bool isOutgoing) {
    int64_t begin = 0;
    for (const auto& piece : division.exact) {
      const int64_t length = piece.end - piece.begin;
      const at::Tensor gradients = bucket.flat.narrow(0, piece.begin, length);
      const at::Tensor place = message.narrow(0, begin, length);
      if (isOutgoing) {
        place.copy_(gradients);
      } else {
        gradients.copy_(place);
      }
      begin += length;
    }
  }

  void reduceFirst(at::Tensor& message, int64_t pElements, Bucket& bucket, Communicator& communicator) const {
    at::Tensor factors = message.narrow(0, 0, coding_ ? pElements : message.numel());
    at::Tensor rest = message.narrow(0, factors.numel(), message.numel() - factors.numel());
    if (coding_ && bucket.tellsUse) {
      std::vector<compressed::Sum> sums = {{factors, *coding_}, {rest, {.codec = rawCodec(rest.scalar_type())}}};
      static_cast<void>(compressed::reduceToMeans(sums, meanOptions(communicator), bucket.seconds, communicator));
      return;
    }
    reduceFactors(factors, stages::kAllReduceP, bucket.seconds, communicator);
    if (rest.numel() == 0) return;
    const Stage stage(bucket.seconds, stages::kAllReduceExact);
    communicator.allReduce(rest, c10d::ReduceOp::AVG);
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
                {"codec", std::string(), "One of available_codecs(), for the factors; '': full precision."},
                {"seed", int64_t{0}, "Of the random factors."}},
    .create =
        [](const Options& options) {
          return std::make_unique<PowerSgd>(PowerSgdOptions{
              .worth = {.rank = options.get<int64_t>("rank"), .minCompression = options.get<double>("min_compression")},
              .startStep = options.get<int64_t>("start_step"),
              .hasErrorFeedback = options.get<bool>("error_feedback"),
              .isWarm = options.get<bool>("warm_start"),
              .isHierarchical = options.get<bool>("hierarchical"),
              .seed = options.get<int64_t>("seed"),
              .codec = options.get<std::string>("codec")});
        },
})

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "algorithms/compressed/mean.h"
#include "algorithms/parameter_state.h"
#include "algorithms/powersgd/matrices.h"
#include "algorithms/powersgd/starting_factors.h"
#include "algorithms/registry.h"
#include "kernels/low_rank/matrix_batch.h"
#include "kernels/low_rank/orthogonalize.h"

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
class PowerSgd final : public Algorithm {
 public:
  explicit PowerSgd(PowerSgdOptions options)
      : options_(std::move(options)), residuals_("residual"), starts_(options_.isWarm, options_.seed) {
    TORCH_CHECK_VALUE(options_.worth.rank >= 1, "bagua: rank must be at least 1, got ", options_.worth.rank);
    TORCH_CHECK_VALUE(options_.startStep >= 0, "bagua: start_step must be at least 0, got ", options_.startStep);
    TORCH_CHECK_VALUE(options_.worth.minCompression > 0 && std::isfinite(options_.worth.minCompression),
                      "bagua: min_compression must be positive, got ", options_.worth.minCompression);
    if (!options_.codec.empty()) coding_ = compressed::Coding{.codec = CodecRegistry::find(options_.codec).codec};
  }

  void reduce(Bucket& bucket, Communicator& communicator) override {
    if (bucket.flat.numel() == 0 || communicator.size() == 1) return;
    const bool isExact = bucket.step < options_.startStep ||
                         !compressed::isCoded({.hierarchical = options_.isHierarchical}, communicator.topology());
    const Division division = isExact ? Division{} : powersgd::divide(bucket, options_.worth);
    if (!division.groups.empty()) return reduceByFactors(bucket, division, communicator);
    const Stage stage(bucket.seconds, "allreduce");
    communicator.allReduce(bucket.flat, c10d::ReduceOp::AVG);
  }

  [[nodiscard]] bool bucketsMayOverlap() const override { return true; }
  [[nodiscard]] bool sendsByStep() const override { return true; }
  [[nodiscard]] std::string whyUncoded(const HostTopology& topology) const override {
    return compressed::whyUncoded({.hierarchical = options_.isHierarchical}, topology);
  }

  [[nodiscard]] int64_t stateBytes() const override { return residuals_.bytes() + starts_.bytes(); }

  [[nodiscard]] AlgorithmState state() const override {
    AlgorithmState state = residuals_.state();
    state.merge(starts_.state());
    return state;
  }

  void load(const AlgorithmState& state, StepContext& context) override {
    for (const auto& [name, value] : state) {
      TORCH_CHECK_VALUE(name.starts_with("residual.") || powersgd::StartingFactors::isName(name),
                        "bagua: algorithm 'powersgd' has no '", name, "' in its state");
    }
    residuals_.load(state, context.parameters());
    starts_.load(state, context.parameters(), options_.worth);
  }

 private:
  // The matrices of one shape at work.
  struct Work {
    const MatrixGroup* group;
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
    // P, and behind it the gradients that travel as they are.
    at::Tensor first = at::empty({pElements + elementsOf(division.exact)}, options);
    at::Tensor second = at::empty({qElements}, options);
    std::vector<Work> works = begin(bucket, division, first, second);
    {
      const Stage stage(bucket.seconds, "multiply");
      for (auto& work : works) {
        low_rank::orthogonalize(work.q);
        work.batch.multiply(work.q, work.p);
      }
      copyExact(bucket, division, first.narrow(0, pElements, first.numel() - pElements), true);
    }
    reduceFirst(first, pElements, bucket.seconds, communicator);
    at::Tensor areUsable = at::isfinite(first).all();
    {
      const Stage stage(bucket.seconds, "multiply_transposed");
      for (auto& work : works) {
        low_rank::orthogonalize(work.p);
        work.batch.multiplyTransposed(work.p, work.q);
      }
    }
    reduceFactors(second, "allreduce_q", bucket.seconds, communicator);
    areUsable.logical_and_(at::isfinite(second).all());
    const Stage stage(bucket.seconds, "replace");
    copyExact(bucket, division, first.narrow(0, pElements, first.numel() - pElements), false);
    for (auto& work : works) {
      work.batch.replace(work.p, work.q, areUsable);
      starts_.keep(*work.group, at::where(areUsable, work.q, work.start));
    }
  }

  std::vector<Work> begin(const Bucket& bucket, const Division& division, const at::Tensor& first,
                          const at::Tensor& second) {
    const at::Tensor residuals =
        options_.hasErrorFeedback ? residuals_.flatFor(bucket, division.matrices) : at::Tensor();
    std::vector<Work> works;
    int64_t pBegin = 0;
    int64_t qBegin = 0;
    for (const auto& group : division.groups) {
      const auto [rows, columns, rank] = group.shape;
      const auto count = static_cast<int64_t>(group.matrices.size());
      std::vector<at::Tensor> gradients;
      std::vector<at::Tensor> ofGradients;
      for (const auto& matrix : group.matrices) {
        const int64_t length = matrix.elements.end - matrix.elements.begin;
        gradients.push_back(bucket.flat.narrow(0, matrix.elements.begin, length).view({rows, columns}));
        if (!residuals.defined()) continue;
        const int64_t place = placeIn(division.matrices, matrix.elements.begin);
        ofGradients.push_back(residuals.narrow(0, place, length).view({rows, columns}));
      }
      const at::Tensor p = first.narrow(0, pBegin, count * rank * rows).view({count, rank, rows});
      const at::Tensor q = second.narrow(0, qBegin, count * rank * columns).view({count, rank, columns});
      pBegin += p.numel();
      qBegin += q.numel();
      const at::Tensor start = starts_.startOf(group, bucket.step, second.options());
      q.copy_(start);
      works.push_back(
          {.group = &group, .batch = {std::move(gradients), std::move(ofGradients)}, .start = start, .p = p, .q = q});
    }
    return works;
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

  void reduceFirst(at::Tensor& message, int64_t pElements, StageSeconds& seconds, Communicator& communicator) const {
    at::Tensor factors = message.narrow(0, 0, coding_ ? pElements : message.numel());
    reduceFactors(factors, "allreduce_p", seconds, communicator);
    if (factors.numel() == message.numel()) return;
    at::Tensor exact = message.narrow(0, pElements, message.numel() - pElements);
    const Stage stage(seconds, "allreduce_exact");
    communicator.allReduce(exact, c10d::ReduceOp::AVG);
  }

  void reduceFactors(at::Tensor& factors, const char* name, StageSeconds& seconds, Communicator& communicator) const {
    if (coding_) {
      const bool isHierarchical = communicator.topology().hostCount() > 1;
      return compressed::reduceToMean(factors, {.hierarchical = isHierarchical}, *coding_, seconds, communicator);
    }
    const Stage stage(seconds, name);
    communicator.allReduce(factors, c10d::ReduceOp::AVG);
  }

  const PowerSgdOptions options_;
  std::optional<compressed::Coding> coding_;
  ParameterState residuals_;
  powersgd::StartingFactors starts_;
};

}  // namespace

BAGUA_REGISTER_ALGORITHM({
    .name = "powersgd",
    .summary = "Mean of the gradients, whose matrices travel as products of two thin factors.",
    .position = 7,
    .agreement = Agreement::kIdentical,
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

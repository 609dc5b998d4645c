// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>

#include <memory>
#include <string>

#include "algorithms/registry.h"
#include "algorithms/shared/compressed/coded_gradients.h"

namespace bagua {
namespace {

Rounding roundingOf(const std::string& name) {
  if (name == "nearest") return Rounding::kNearest;
  TORCH_CHECK_VALUE(name == "stochastic",
                    "option 'rounding' of algorithm 'quantized_allreduce' takes 'nearest' or 'stochastic', got '", name,
                    "'");
  return Rounding::kStochastic;
}

bool areSmall(const std::string& residuals) {
  if (residuals == "float32") return false;
  TORCH_CHECK_VALUE(residuals == "8bit",
                    "option 'residuals' of algorithm 'quantized_allreduce' takes 'float32' or '8bit', got '", residuals,
                    "'");
  return true;
}

class QuantizedAllReduce final : public compressed::CodedGradients, public KeepsResiduals, public ReadsOptimizer {
 public:
  using CodedGradients::CodedGradients;

  [[nodiscard]] bool keepsAny() const override { return hasFeedback(); }
  void rescale(double factor) override { rescaleResiduals(factor); }
  void passOver(Bucket& bucket, Communicator& communicator) override { passOverResiduals(bucket, communicator); }
  void agreeOnStep(at::Device device, Communicator& communicator) override { agreeOnResiduals(device, communicator); }
  void useOptimizer(bool isLinear) override { chooseFeedback(isLinear); }
};

}  // namespace

BAGUA_REGISTER_ALGORITHM({
    .name = "quantized_allreduce",
    .summary = "Mean of the gradients with 4 bits or fewer, and error feedback.",
    .position = 8,
    .agreement = Agreement::kIdentical,
    .relativeError = 0.15,
    .options =
        {{"codec", std::string("4bit"),
          "One of bagua.available_codecs(), with int8 for embeddings, the head and what has one dimension where it has "
          "fewer bits; or a mapping to codecs from 'embedding', 'head' (the last linear layer), '1d' (biases, norms), "
          "'small' (below 1024 elements, or a shard below 128) and patterns of parameters' names, of which the first "
          "that fits counts; the "
          "last is '*'.",
          true},
         {.name = "error_feedback",
          .defaultValue = std::string("auto"),
          .summary =
              "Whether what coding leaves behind is added to the next step's gradients, at the sender and at the "
              "owner of a chunk. 'auto': with 4 bits, and with 2 where the optimizer is given and is SGD.",
          .alsoTakes = true},
         {"start_step", int64_t{0}, "Full precision before this step."},
         Guard::option(),
         {"residuals", std::string("float32"),
          "How error feedback keeps what is left behind: 'float32', or '8bit', a moving average in a quarter of the "
          "memory."},
         {"exact", std::string(compressed::kExactByDefault),
          "What travels uncoded in the same messages: words and patterns as in codec."},
         {"rounding", std::string("nearest"), "'nearest' or 'stochastic' (unbiased, with a larger error)."},
         {"hierarchical", true,
          "Full precision inside a host, coded between hosts (on a single host nothing is coded); False: coded "
          "between all ranks."},
         {"average", true, "Mean over the ranks; False: sum."}},
    .create = [](const Options& options) -> std::unique_ptr<Algorithm> {
      return std::make_unique<QuantizedAllReduce>(
          compressed::Selection(options.get<std::string>("codec"), options.get<std::string>("exact")),
          compressed::CodedGradientsOptions{
              .mean = {.hierarchical = options.get<bool>("hierarchical"), .average = options.get<bool>("average")},
              .startStep = compressed::startStepOf(options),
              .rounding = roundingOf(options.get<std::string>("rounding")),
              .feedback = compressed::FeedbackChoice(options.values().at("error_feedback")),
              .hasSmallResiduals = areSmall(options.get<std::string>("residuals"))},
          Guard::modeOf(options));
    },
})

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>

#include "algorithms/registry.h"
#include "algorithms/shared/compressed/coded_gradients.h"

namespace bagua {

// All-to-all of compressed chunks, reduction of the own chunk in float, all-gather of the compressed result. Each rank
// sends about 2 N bytes for N gradients instead of 8 N.
BAGUA_REGISTER_ALGORITHM({
    .name = "bytegrad",
    .summary = "Mean of the gradients with 8-bit messages.",
    .position = 2,
    .agreement = Agreement::kIdentical,
    .options = {{"hierarchical", true,
                 "Full precision inside a host, 8 bits between hosts (on a single host nothing is compressed); "
                 "False: 8 bits between all ranks."},
                {"average", true, "Mean over the ranks; False: sum."},
                {"codec", std::string(compressed::kDefaultCodec), "One of bagua.available_codecs()."},
                {"start_step", int64_t{0}, "Full precision before this step."},
                Guard::option()},
    .create = [](const Options& options) -> std::unique_ptr<Algorithm> {
      return std::make_unique<compressed::CodedGradients>(
          compressed::Selection::ofOne(options.get<std::string>("codec")),
          compressed::CodedGradientsOptions{
              .mean = {.hierarchical = options.get<bool>("hierarchical"), .average = options.get<bool>("average")},
              .startStep = compressed::startStepOf(options)},
          Guard::modeOf(options));
    },
})

}  // namespace bagua

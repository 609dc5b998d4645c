// SPDX-License-Identifier: Apache-2.0
#include "algorithms/registry.h"
#include "algorithms/shared/rounds/rounds.h"

namespace bagua {

BAGUA_REGISTER_ALGORITHM({
    .name = "local_sgd",
    .summary = "Weights averaged every sync_every steps; ranks train on their own in between.",
    .position = 9,
    .agreement = Agreement::kEventual,
    .optimizer = "Optimizer",
    .runsInBackground = true,
    .options = {{"sync_every", int64_t{8}, "Steps of the optimizer between two averages."},
                {"hierarchical", false,
                 "Gradients averaged in every step inside a host, weights between hosts; False: every rank by itself."},
                {"average_buffers", false,
                 "Floating-point buffers (running statistics) are averaged with the weights."}},
    .create =
        [](const Options& options) {
          return std::make_unique<rounds::Rounds>(
              rounds::Settings{.schedule = {.every = options.get<int64_t>("sync_every"), .fragments = 1, .delay = 0},
                               .hierarchical = options.get<bool>("hierarchical"),
                               .averageBuffers = options.get<bool>("average_buffers")});
        },
})

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#include "algorithms/registry.h"
#include "algorithms/shared/rounds/rounds.h"

namespace bagua {

BAGUA_REGISTER_ALGORITHM({
    .name = "diloco",
    .summary = "An outer optimizer on what the ranks' weights have moved in sync_every steps, in the background.",
    .position = 10,
    .agreement = Agreement::kEventual,
    .optimizer = "Optimizer",
    .runsInBackground = true,
    .options = {{"sync_every", int64_t{100},
                 "Steps of the inner optimizer between two synchronisations of a fragment."},
                {"outer_lr", 0.7, "Learning rate of the outer optimizer, SGD."},
                {"outer_momentum", 0.9, "Its momentum; 0: none."},
                {"nesterov", true, "Whether its momentum is Nesterov's."},
                {"fragments", int64_t{1},
                 "The model is cut into so many, synchronised one after another; sync_every is a multiple."},
                {"fragment_pattern", std::string("consecutive"),
                 "'consecutive': neighbouring layers make a fragment; 'strided': every so many layers."},
                {"delay", int64_t{0},
                 "Steps between the beginning of a fragment's exchange and its use; less than sync_every / fragments."},
                {"mixing", 0.0, "What a rank keeps of its own weights when a fragment is synchronised, 0 to 1."},
                {"codec", std::string(),
                 "How differences are coded, one of available_codecs(); None: in full precision."},
                {"error_feedback", true, "What a codec leaves of a difference is added to the next."},
                {"hierarchical", false,
                 "Gradients averaged in every step inside a host, rounds between hosts; False: every rank by itself."},
                {"average_buffers", false,
                 "Floating-point buffers (running statistics) are averaged with the last fragment of a round."}},
    .create =
        [](const Options& options) {
          const auto& codec = options.get<std::string>("codec");
          return std::make_unique<rounds::Rounds>(rounds::Settings{
              .schedule = rounds::Schedule(options.get<int64_t>("sync_every"), options.get<int64_t>("fragments"),
                                           options.get<int64_t>("delay")),
              .pattern = rounds::patternOf(options.get<std::string>("fragment_pattern")),
              .mixing = options.get<double>("mixing"),
              .outer = rounds::OuterOptions{.rate = options.get<double>("outer_lr"),
                                            .momentum = options.get<double>("outer_momentum"),
                                            .nesterov = options.get<bool>("nesterov")},
              .codec = codec.empty() ? nullptr : CodecRegistry::find(codec).codec,
              .errorFeedback = options.get<bool>("error_feedback"),
              .hierarchical = options.get<bool>("hierarchical"),
              .averageBuffers = options.get<bool>("average_buffers")});
        },
})

}  // namespace bagua

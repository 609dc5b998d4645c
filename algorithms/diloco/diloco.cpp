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
    .options =
        {{.name = "sync_every",
          .defaultValue = std::string("auto"),
          .summary = "Steps of the inner optimizer between two synchronisations of a fragment; 'auto': as few as "
                     "the line can carry, by a measurement in the first steps, and 30 or more.",
          .alsoTakes = int64_t{}},
         {"outer_lr", 0.7, "Learning rate of the outer optimizer, SGD."},
         {"outer_momentum", 0.5, "Its momentum; 0: none. With several hundred rounds 0.9, as published."},
         {"nesterov", true, "Whether its momentum is Nesterov's."},
         {.name = "fragments",
          .defaultValue = std::string("auto"),
          .summary = "The model is cut into so many, synchronised one after another; sync_every is a multiple. "
                     "'auto': up to 4, as many as there are layers.",
          .alsoTakes = int64_t{}},
         {"fragment_pattern", std::string("consecutive"),
          "'consecutive': neighbouring layers make a fragment; 'strided': every so many layers."},
         {.name = "delay",
          .defaultValue = std::string("auto"),
          .summary = "Steps between the beginning of a fragment's exchange and its use, less than sync_every / "
                     "fragments; 'auto': as many as the exchange takes, by a measurement in the first steps.",
          .alsoTakes = int64_t{}},
         {"mixing", 0.0, "What a rank keeps of its own weights when a fragment is synchronised, 0 to 1."},
         {"codec", std::string(), "How differences are coded, one of available_codecs(); None: in full precision."},
         {"error_feedback", true, "What a codec leaves of a difference is added to the next."},
         Guard::option(Guard::Messages::kDifferences),
         {"hierarchical", false,
          "Gradients averaged in every step inside a host, rounds between hosts; False: every rank by itself."},
         {"average_buffers", false,
          "Floating-point buffers (running statistics) are averaged with the last fragment of a round."}},
    .create =
        [](const Options& options) {
          const auto& codec = options.get<std::string>("codec");
          return std::make_unique<rounds::Rounds>(
              rounds::Settings{.schedule = {.every = options.numberUnlessAuto("sync_every"),
                                            .fragments = options.numberUnlessAuto("fragments"),
                                            .delay = options.numberUnlessAuto("delay")},
                               .pattern = rounds::patternOf(options.get<std::string>("fragment_pattern")),
                               .mixing = options.get<double>("mixing"),
                               .outer = rounds::OuterOptions{.rate = options.get<double>("outer_lr"),
                                                             .momentum = options.get<double>("outer_momentum"),
                                                             .nesterov = options.get<bool>("nesterov")},
                               .codec = codec.empty() ? nullptr : &CodecRegistry::find(codec),
                               .errorFeedback = options.get<bool>("error_feedback"),
                               .guard = Guard::modeOf(options, Guard::Messages::kDifferences),
                               .hierarchical = options.get<bool>("hierarchical"),
                               .averageBuffers = options.get<bool>("average_buffers")});
        },
})

}  // namespace bagua

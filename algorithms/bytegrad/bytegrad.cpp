// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>

#include "algorithms/registry.h"
#include "algorithms/shared/compressed/mean.h"

namespace bagua {
namespace {

// Mean of the gradients with coded messages, of 8 bits unless a codec is named: all-to-all of compressed chunks,
// reduction of the own chunk in float, all-gather of the compressed result. Each rank sends about 2 N bytes for N
// gradients instead of 8 N.
class ByteGrad final : public Algorithm {
 public:
  ByteGrad(const compressed::MeanOptions& options, const std::string& codec)
      : options_(options), codec_(CodecRegistry::find(codec).codec) {}

  void reduce(Bucket& bucket, Communicator& communicator) override {
    compressed::reduceToMean(bucket.flat, options_, compressed::codingOf(codec_, bucket.key), bucket.seconds,
                             communicator);
  }

  [[nodiscard]] ReduceTraits traits() const override {
    return {.bucketsMayOverlap = true,
            .isStateless = true,
            .isReplayable = !codec_->usesKey(Rounding::kNearest),
            .averagesSparse = options_.average};
  }
  [[nodiscard]] std::string whyUncoded(const HostTopology& topology) const override {
    return compressed::whyUncoded(options_, topology);
  }

 private:
  const compressed::MeanOptions options_;
  const std::shared_ptr<const Codec> codec_;
};

}  // namespace

BAGUA_REGISTER_ALGORITHM({
    .name = "bytegrad",
    .summary = "Mean of the gradients with 8-bit messages.",
    .position = 2,
    .agreement = Agreement::kIdentical,
    .options = {{"hierarchical", true,
                 "Full precision inside a host, 8 bits between hosts (on a single host nothing is compressed); "
                 "False: 8 bits between all ranks."},
                {"average", true, "Mean over the ranks; False: sum."},
                {"codec", std::string(compressed::kDefaultCodec), "One of bagua.available_codecs()."}},
    .create =
        [](const Options& options) {
          return std::make_unique<ByteGrad>(compressed::MeanOptions{.hierarchical = options.get<bool>("hierarchical"),
                                                                    .average = options.get<bool>("average")},
                                            options.get<std::string>("codec"));
        },
})

}  // namespace bagua

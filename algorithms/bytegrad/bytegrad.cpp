// SPDX-License-Identifier: Apache-2.0
#include "algorithms/bytegrad/compressed_mean.h"
#include "algorithms/registry.h"

namespace bagua {
namespace {

// Mean of the gradients with 8-bit messages: all-to-all of compressed chunks, reduction of the own chunk in float,
// all-gather of the compressed result. Each rank sends about 2 N bytes for N gradients instead of 8 N.
class ByteGrad final : public Algorithm {
 public:
  explicit ByteGrad(const bytegrad::CompressedMean& options) : options_(options) {}

  void reduce(Bucket& bucket, Communicator& communicator) override {
    bytegrad::reduceCompressed(bucket, options_, communicator);
  }

  [[nodiscard]] bool bucketsMayOverlap() const override { return true; }
  [[nodiscard]] bool averages() const override { return options_.average; }

 private:
  const bytegrad::CompressedMean options_;
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
                {"average", true, "Mean over the ranks; False: sum."}},
    .create =
        [](const Options& options) {
          return std::make_unique<ByteGrad>(bytegrad::CompressedMean{.hierarchical = options.get<bool>("hierarchical"),
                                                                     .average = options.get<bool>("average")});
        },
})

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include "algorithms/bytegrad/compressed_exchange.h"
#include "algorithms/host_lanes.h"
#include "algorithms/registry.h"

namespace bagua {
namespace {

// Mean of the gradients with 8-bit messages: all-to-all of compressed chunks, reduction of the own chunk in float,
// all-gather of the compressed result. Each rank sends about 2 N bytes for N gradients instead of 8 N.
class ByteGrad final : public Algorithm {
 public:
  ByteGrad(bool hierarchical, bool average) : hierarchical_(hierarchical), average_(average) {}

  void reduce(Bucket& bucket, Communicator& communicator) override {
    if (bucket.flat.numel() == 0 || communicator.size() == 1) return;
    if (!hierarchical_) {
      return reduceOver(HostTopology::oneRankPerHost(communicator.size()), bucket, communicator);
    }
    if (communicator.topology().hostCount() > 1) return reduceOver(communicator.topology(), bucket, communicator);
    // Full precision inside a host, and there is only one.
    const Stage stage(bucket, "allreduce");
    communicator.allReduce(bucket.flat, average_ ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
  }

  [[nodiscard]] bool averages() const override { return average_; }

 private:
  void reduceOver(const HostTopology& topology, Bucket& bucket, Communicator& communicator) const {
    at::Tensor& flat = bucket.flat;
    const HostLanes lanes(topology, communicator.rank(), flat.numel());
    const float divisor = average_ ? static_cast<float>(communicator.size()) : 1.0F;
    if (lanes.count() == 1) return bytegrad::exchangeBetweenHosts(flat, lanes, divisor, bucket, communicator);
    {
      const Stage stage(bucket, "reduce_in_host");
      reduceInHost(flat, lanes, divisor, communicator);
    }
    // Already divided above, where a sum of 16-bit floats could overflow.
    bytegrad::exchangeBetweenHosts(flat, lanes, 1.0F, bucket, communicator);
    const Stage stage(bucket, "gather_in_host");
    gatherInHost(flat, lanes, communicator);
  }

  // Each owner's lanes become the sum over the host divided by `divisor`, in full precision.
  static void reduceInHost(at::Tensor& flat, const HostLanes& lanes, float divisor, Communicator& communicator) {
    const int rank = communicator.rank();
    const int64_t own = lanes.ownLength(rank);
    at::Tensor copies = at::empty({lanes.localSize(), own}, flat.options());
    communicator.allToAll(copies, flat, lanes.ownedBySelf(), lanes.ownedByPeers());
    const bool isDouble = flat.scalar_type() == at::kDouble;
    const at::Tensor sum = copies.sum(0, false, isDouble ? at::kDouble : at::kFloat).div_(divisor);
    flat.narrow(0, lanes.begin(lanes.firstLane(rank)), own).copy_(sum);
  }

  // Everybody on the host receives the lanes of everybody else.
  static void gatherInHost(at::Tensor& flat, const HostLanes& lanes, Communicator& communicator) {
    const int rank = communicator.rank();
    const at::Tensor own = flat.narrow(0, lanes.begin(lanes.firstLane(rank)), lanes.ownLength(rank));
    const at::Tensor sent = own.repeat({lanes.localSize()});
    communicator.allToAll(flat, sent, lanes.ownedByPeers(), lanes.ownedBySelf());
  }

  const bool hierarchical_;
  const bool average_;
};

}  // namespace

BAGUA_REGISTER_ALGORITHM({
    .name = "bytegrad",
    .summary = "Mean of the gradients with 8-bit messages.",
    .agreement = Agreement::kIdentical,
    .options = {{"hierarchical", true,
                 "Full precision inside a host, 8 bits between hosts (on a single host nothing is compressed); "
                 "False: 8 bits between all ranks."},
                {"average", true, "Mean over the ranks; False: sum."}},
    .create =
        [](const Options& options) {
          return std::make_unique<ByteGrad>(options.get<bool>("hierarchical"), options.get<bool>("average"));
        },
})

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#include "algorithms/bytegrad/compressed_mean.h"

#include "algorithms/bytegrad/compressed_exchange.h"
#include "algorithms/in_host.h"

namespace bagua::bytegrad {
namespace {

void reduceOver(const HostTopology& topology, Bucket& bucket, bool average, Communicator& communicator) {
  at::Tensor& flat = bucket.flat;
  const HostLanes lanes(topology, communicator.rank(), flat.numel());
  const float divisor = average ? static_cast<float>(communicator.size()) : 1.0F;
  if (lanes.count() == 1) return exchangeBetweenHosts(flat, lanes, divisor, bucket.seconds, communicator);
  {
    const Stage stage(bucket.seconds, "reduce_in_host");
    reduceInHost(flat, lanes, divisor, communicator);
  }
  // Already divided above, where a sum of 16-bit floats could overflow.
  exchangeBetweenHosts(flat, lanes, 1.0F, bucket.seconds, communicator);
  const Stage stage(bucket.seconds, "gather_in_host");
  gatherInHost(flat, lanes, communicator);
}

}  // namespace

void reduceCompressed(Bucket& bucket, const CompressedMean& options, Communicator& communicator) {
  if (bucket.flat.numel() == 0 || communicator.size() == 1) return;
  if (!options.hierarchical) {
    return reduceOver(HostTopology::oneRankPerHost(communicator.size()), bucket, options.average, communicator);
  }
  if (communicator.topology().hostCount() > 1) {
    return reduceOver(communicator.topology(), bucket, options.average, communicator);
  }
  // Full precision inside a host, and there is only one.
  const Stage stage(bucket.seconds, "allreduce");
  communicator.allReduce(bucket.flat, options.average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
}

}  // namespace bagua::bytegrad

// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/bucket_operations.h"

#include <c10/util/Exception.h>

#include "algorithms/capture.h"
#include "algorithms/shared/weight_exchanges/peer_average.h"

namespace bagua::bucket_operations {
namespace {

// Scripts of the original ask for its packets by their name, "MinMaxUInt8", so the default codec is not theirs.
constexpr const char* kOriginalCodec = "minmax_uint8";

compressed::Coding originalCoding() { return {.codec = CodecRegistry::find(kOriginalCodec).codec}; }

// One after another: a user may start several on one bucket and wait for the last.
c10::intrusive_ptr<c10d::Work> submit(ExecutorProvider& executors, const char* name, const at::Tensor& flat,
                                      Program program) {
  const Operation operation{.type = c10d::OpType::ALLREDUCE,
                            .name = name,
                            .dtype = flat.scalar_type(),
                            .numel = flat.numel(),
                            .timeout = executors.timeout()};
  return executors.executorFor(flat.device()).submit(operation, {flat}, std::move(program));
}

}  // namespace

c10::intrusive_ptr<c10d::Work> reduce(ExecutorProvider& executors, const at::Tensor& flat, bool isCompressed,
                                      const compressed::MeanOptions& options) {
  return submit(executors, "bagua:reduce_bucket", flat,
                [flat = flat, isCompressed, options](Communicator& communicator) mutable {
                  StageSeconds seconds;
                  if (isCompressed) return compressed::reduceToMean(flat, options, originalCoding(), seconds, communicator);
                  communicator.allReduce(flat, options.average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
                });
}

c10::intrusive_ptr<c10d::Work> averagePeers(ExecutorProvider& executors, const at::Tensor& flat, int64_t exchange,
                                            bool hierarchical, const std::string& mode) {
  const PeerAverage average(hierarchical, mode);
  if (average.pairs()) refuseCapture(executors, flat.device(), "An average of pairs of ranks");
  return submit(executors, "bagua:average_weights", flat,
                [flat = flat, exchange, average](Communicator& communicator) mutable {
                  StageSeconds seconds;
                  average.reduce(flat, exchange, seconds, communicator);
                });
}

c10::intrusive_ptr<c10d::Work> exchangeInRing(ExecutorProvider& executors, const at::Tensor& flat,
                                              const RingReplicas& replicas, bool hierarchical) {
  for (const auto& replica : {replicas.self, replicas.left, replicas.right}) {
    TORCH_CHECK_VALUE(replica.numel() == flat.numel() && replica.scalar_type() == flat.scalar_type(),
                      "bagua: a replica of ", flat.numel(), " weights of type ", flat.scalar_type(), " holds ",
                      replica.numel(), " of type ", replica.scalar_type());
  }
  return submit(executors, "bagua:exchange_differences", flat,
                [flat = flat, replicas, hierarchical](Communicator& communicator) mutable {
                  const HostTopology topology =
                      hierarchical ? communicator.topology() : HostTopology::oneRankPerHost(communicator.size());
                  if (topology.hostCount() == 1) return communicator.allReduce(flat, c10d::ReduceOp::AVG);
                  const RingExchange ring(topology, communicator.rank(), flat.numel(), originalCoding());
                  RingReplicas own = ring.ownPartOf(replicas, communicator.rank());
                  StageSeconds seconds;
                  ring.step(flat, own, seconds, communicator);
                });
}

std::shared_ptr<AverageRound> startAverageRound(ExecutorProvider& executors, const at::Tensor& flat, bool wantsToEnd) {
  refuseCapture(executors, flat.device(), "A round of an average in the background");
  const auto submitRound = [&](const std::vector<at::Tensor>& tensors, StepContext::Task task) {
    return submit(executors, "bagua:average_weights", tensors.front(),
                  [task = std::move(task)](Communicator& communicator) {
                    StageSeconds seconds;
                    task(communicator, seconds);
                  });
  };
  return std::make_shared<AverageRound>(std::vector<at::Tensor>{flat.detach().clone()}, wantsToEnd, submitRound);
}

}  // namespace bagua::bucket_operations

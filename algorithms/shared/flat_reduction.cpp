// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/flat_reduction.h"

#include <memory>
#include <string>

namespace bagua {
namespace {

// Scripts of the original ask for its packets by their name, "MinMaxUInt8", so the default codec is not theirs.
constexpr const char* kOriginalCodec = "minmax_uint8";

}  // namespace

c10::intrusive_ptr<c10d::Work> reduceFlat(ExecutorProvider& executors, const at::Tensor& flat, bool isCompressed,
                                          const compressed::MeanOptions& options) {
  // `hierarchical` changes nothing where nothing is coded.
  const char* const way = !isCompressed ? "" : options.hierarchical ? "MinMaxUInt8 between hosts" : "MinMaxUInt8";
  const Operation operation{.type = c10d::OpType::ALLREDUCE,
                            .name = "bagua:reduce_bucket",
                            .dtype = flat.scalar_type(),
                            .numel = flat.numel(),
                            .timeout = executors.timeout(),
                            .reduceOp = static_cast<int>(options.average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM),
                            .configuration = std::make_shared<const std::string>(way)};
  // One after another: a user may start several on one bucket and wait for the last.
  return executors.executorFor(flat.device())
      ->submit(operation, {flat}, [flat = flat, isCompressed, options](Communicator& communicator) mutable {
        if (!isCompressed) {
          communicator.allReduce(flat, options.average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
          return;
        }
        StageSeconds seconds;
        const compressed::Coding coding{.codec = CodecRegistry::find(kOriginalCodec).codec};
        compressed::reduceToMean(flat, options, coding, seconds, communicator);
      });
}

}  // namespace bagua

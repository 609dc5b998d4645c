// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/collectives/cpu_communicator.h"
#include "backend/cpu/collectives/reduction.h"
#include "backend/operation/tensor_bytes.h"

namespace bagua {
namespace {

// In a flat tensor, one after another.
std::vector<SharedMemoryExchange::Span> spansOf(const Communicator::Splits& parts) {
  std::vector<SharedMemoryExchange::Span> spans;
  int64_t begin = 0;
  for (const int64_t part : parts) {
    spans.push_back({begin, part});
    begin += part;
  }
  return spans;
}

}  // namespace

c10d::ReduceOp CpuCommunicator::reduceToOwnLanes(at::Tensor& flat, const at::Tensor& prepared, const HostLanes& lanes,
                                                 const ReduceOp& op) {
  if (lanes.count() == 1) {
    if (!prepared.is_same(flat)) flat.copy_(prepared);
    return op;
  }
  const auto steps = reduction::inTwoSteps(op, flat.scalar_type());
  if (sharedMemory()) {
    reduceParts(flat, prepared, lanes.partsInHost(), steps.first, size());
  } else if (steps.first == ReduceOp::AVG || !prepared.is_same(flat)) {
    reduction::reduceParts({prepared.const_data_ptr()}, steps.first, size(), flat);
  }
  return steps.second;
}

void CpuCommunicator::reduceParts(at::Tensor& flat, const at::Tensor& prepared, const Splits& parts, const ReduceOp& op,
                                  int64_t contributors) {
  const auto spans = spansOf(parts);
  const Span& span = spans[sharedMemory()->rank()];
  at::Tensor own = flat.narrow(0, span.begin, span.length);
  countShown((flat.numel() - span.length) * itemSize(flat));
  sharedMemory()->reduceSpans(own, prepared, spans, op, contributors, deadline());
}

void CpuCommunicator::gatherParts(at::Tensor& flat, const Splits& parts) {
  countShown(parts[sharedMemory()->rank()] * itemSize(flat) * (sharedMemory()->size() - 1));
  sharedMemory()->gather(flat, spansOf(parts), deadline());
}

void CpuCommunicator::reduceScatterInHost(at::Tensor& flat, const Splits& parts, int64_t divisor) {
  if (flat.numel() == 0) return;
  connect();
  if (!shareMemoryInHosts()) return Communicator::reduceScatterInHost(flat, parts, divisor);
  if (sharedMemory()) {
    reduceParts(flat, flat, parts, divisor == 1 ? ReduceOp::SUM : ReduceOp::AVG, divisor);
  } else {
    divide(flat, divisor);
  }
}

void CpuCommunicator::allGatherInHost(at::Tensor& flat, const Splits& parts) {
  if (flat.numel() == 0) return;
  connect();
  if (!shareMemoryInHosts()) return Communicator::allGatherInHost(flat, parts);
  if (sharedMemory()) gatherParts(flat, parts);
}

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/nccl_communicator.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "backend/cuda/nccl_types.h"
#include "backend/cuda/premul_sum.h"
#include "backend/cuda/run_together.h"
#include "backend/operation/tensor_bytes.h"

namespace bagua {
namespace {

int64_t sizeOf(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

// A part of a tensor's memory that crosses the network as it is.
struct Region {
  std::byte* data;
  size_t size;
};

Region memoryOf(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), static_cast<size_t>(tensor.nbytes())};
}

// Of the parts of a flat tensor, one after another.
std::vector<Region> regionsOf(const at::Tensor& flat, const Communicator::Splits& parts) {
  std::vector<Region> regions;
  auto* next = static_cast<std::byte*>(flat.data_ptr());
  for (const int64_t part : parts) {
    const auto size = static_cast<size_t>(part) * flat.element_size();
    regions.push_back({next, size});
    next += size;
  }
  return regions;
}

bool areEqual(const Communicator::Splits& parts) {
  return std::ranges::all_of(parts, [&](int64_t part) { return part == parts.front(); });
}

}  // namespace

NcclCommunicator::NcclCommunicator(int rank, int size, std::shared_ptr<const HostTopology> topology,
                                   Environment environment)
    : Communicator(rank, size, std::move(topology)),
      environment_(std::move(environment)),
      api_(environment_.api),
      handle_(environment_.api, environment_.prepareThread),
      inHost_(environment_.api, environment_.prepareThread) {}

bool NcclCommunicator::hasInHostStages() const {
  return topology().hostCount() > 1 && topology().maxRanksPerHost() > 1;
}

void NcclCommunicator::connect() {
  environment_.connect(handle_);
  if (!hasInHostStages()) return;
  try {
    inHost_.split(handle_, topology().hostOf(rank()), topology().localRank(rank()),
                  std::chrono::steady_clock::now() + environment_.timeout);
  } catch (...) {
    abort();
    throw;
  }
}

void NcclCommunicator::onComm(NcclHandle& handle, const char* what, const Enqueue& enqueue) {
  if (!handle_.isOpen() && !handle_.isAborted()) connect();
  ++calls_;
  const cudaStream_t stream = environment_.currentStream();
  handle.call(what, std::chrono::steady_clock::now() + remaining(),
              [&](ncclComm_t comm) { return enqueue(comm, stream); });
}

void NcclCommunicator::abort() {
  runTogether(environment_.prepareThread, {[this] { handle_.abort(); }, [this] { inHost_.abort(); }});
}

std::string NcclCommunicator::asyncError() {
  std::string error = handle_.asyncError();
  return error.empty() ? inHost_.asyncError() : error;
}

void NcclCommunicator::close(std::chrono::steady_clock::time_point deadline) {
  inHost_.close(deadline);
  handle_.close(deadline);
}

void NcclCommunicator::enterGraph() {
  inHost_.enterGraph();
  handle_.enterGraph();
}

template <typename EnqueueReduction>
void NcclCommunicator::reduceOnComm(const char* what, const at::Tensor& tensor, const ReduceOp& op,
                                    EnqueueReduction&& enqueue) {
  const NcclReduction reduction = ncclReductionFor(op, tensor.scalar_type());
  if (tensor.numel() == 0) return;
  if (!reduction.isPreMulSum) {
    onComm(what, [&](ncclComm_t comm, cudaStream_t stream) { return enqueue(reduction, reduction.op, comm, stream); });
    return;
  }
  PreMulFactor factor(op, reduction.dtype, tensor.device());
  onComm(what, [&](ncclComm_t comm, cudaStream_t stream) {
    ncclRedOp_t made{};
    const ncclResult_t creation =
        api_.redOpCreatePreMulSum(&made, factor.data(), reduction.dtype, factor.residence(), comm);
    if (creation != ncclSuccess) return creation;
    const ncclResult_t result = enqueue(reduction, made, comm, stream);
    // The enqueueing has copied the operation.
    const ncclResult_t destruction = api_.redOpDestroy(made, comm);
    return result == ncclSuccess ? destruction : result;
  });
}

void NcclCommunicator::broadcast(at::Tensor& tensor, int root) {
  const Region region = memoryOf(tensor);
  if (region.size == 0) return;
  onComm("ncclBroadcast", [&](ncclComm_t comm, cudaStream_t stream) {
    return api_.broadcast(region.data, region.data, region.size, ncclUint8, root, comm, stream);
  });
  if (rank() == root) countSentToEach(sizeOf(tensor));
}

void NcclCommunicator::allReduce(at::Tensor& tensor, const ReduceOp& op) {
  reduceOnComm("ncclAllReduce", tensor, op,
               [&](const NcclReduction& reduction, ncclRedOp_t ncclOp, ncclComm_t comm, cudaStream_t stream) {
                 void* data = tensor.data_ptr();
                 const auto count = static_cast<size_t>(tensor.numel() * reduction.valuesPerElement);
                 return api_.allReduce(data, data, count, reduction.dtype, ncclOp, comm, stream);
               });
  countSentEvenly(2 * sizeOf(tensor) * (size() - 1) / size());
}

void NcclCommunicator::reduce(at::Tensor& tensor, int root, const ReduceOp& op) {
  reduceOnComm("ncclReduce", tensor, op,
               [&](const NcclReduction& reduction, ncclRedOp_t ncclOp, ncclComm_t comm, cudaStream_t stream) {
                 void* data = tensor.data_ptr();
                 const auto count = static_cast<size_t>(tensor.numel() * reduction.valuesPerElement);
                 // NCCL writes to the output of the root alone.
                 return api_.reduce(data, data, count, reduction.dtype, ncclOp, root, comm, stream);
               });
  if (rank() != root) countSentTo(root, sizeOf(tensor));
}

void NcclCommunicator::allGather(at::Tensor& output, const at::Tensor& input) {
  const Region region = memoryOf(input);
  if (region.size == 0) return;
  onComm("ncclAllGather", [&](ncclComm_t comm, cudaStream_t stream) {
    return api_.allGather(region.data, output.data_ptr(), region.size, ncclUint8, comm, stream);
  });
  countSentToEach(sizeOf(input));
}

void NcclCommunicator::reduceScatter(at::Tensor& output, const at::Tensor& input, const ReduceOp& op) {
  reduceOnComm("ncclReduceScatter", output, op,
               [&](const NcclReduction& reduction, ncclRedOp_t ncclOp, ncclComm_t comm, cudaStream_t stream) {
                 const auto count = static_cast<size_t>(output.numel() * reduction.valuesPerElement);
                 return api_.reduceScatter(input.data_ptr(), output.data_ptr(), count, reduction.dtype, ncclOp, comm,
                                           stream);
               });
  countSentToEach(sizeOf(output));
}

std::vector<NcclCommunicator::Message> NcclCommunicator::partsOf(const at::Tensor& tensor, const Splits& splits,
                                                                 bool isSend) const {
  const at::Tensor flat = flatOf(tensor);
  std::vector<Message> parts;
  int64_t begin = 0;
  for (int peer = 0; peer < size(); ++peer) {
    const int64_t length = splits.empty() ? flat.numel() / size() : splits.at(peer);
    parts.push_back({isSend, peer, flat.narrow(0, begin, length)});
    begin += length;
  }
  return parts;
}

std::vector<NcclCommunicator::Message> NcclCommunicator::messagesOf(const at::Tensor& output, const at::Tensor& input,
                                                                    const Splits& outputSplits,
                                                                    const Splits& inputSplits) const {
  std::vector<Message> messages = partsOf(input, inputSplits, /*isSend=*/true);
  for (auto& part : partsOf(output, outputSplits, /*isSend=*/false)) messages.push_back(std::move(part));
  return messages;
}

void NcclCommunicator::allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                                const Splits& inputSplits) {
  exchange(messagesOf(output, input, outputSplits, inputSplits));
}

ncclResult_t NcclCommunicator::enqueueTogether(const std::vector<std::function<ncclResult_t()>>& calls) {
  if (calls.empty()) return ncclSuccess;
  ncclResult_t result = api_.groupStart();
  if (result != ncclSuccess) return result;
  for (const auto& call : calls) {
    result = call();
    if (result != ncclSuccess && result != ncclInProgress) break;
  }
  // Also after an error: NCCL counts open groups per thread.
  const ncclResult_t end = api_.groupEnd();
  return result == ncclSuccess || result == ncclInProgress ? end : result;
}

ncclResult_t NcclCommunicator::enqueueMessages(const std::vector<Message>& messages, ncclComm_t comm,
                                               cudaStream_t stream) {
  std::vector<std::function<ncclResult_t()>> calls;
  for (const auto& message : messages) {
    const Region region = memoryOf(message.tensor);
    if (region.size == 0) continue;
    calls.emplace_back([this, region, &message, comm, stream] {
      return message.isSend ? api_.send(region.data, region.size, ncclUint8, message.peer, comm, stream)
                            : api_.receive(region.data, region.size, ncclUint8, message.peer, comm, stream);
    });
  }
  return enqueueTogether(calls);
}

void NcclCommunicator::reduceScatterInHost(at::Tensor& flat, const Splits& parts, int64_t divisor) {
  if (flat.numel() == 0) return;
  if (parts.size() == 1) {
    divide(flat, divisor);
    return;
  }
  // NCCL adds up 16-bit floats as such: a sum of many loses digits, or overflows.
  const at::Tensor sums = flat.element_size() < 4 ? flat.to(at::kFloat) : flat;
  at::Tensor ownSum = ownPartInHost(sums, parts);
  const ncclDataType_t dtype = ncclReductionFor(ReduceOp::SUM, sums.scalar_type()).dtype;
  const std::vector<Region> regions = regionsOf(sums, parts);
  onComm(inHost(), "ncclReduceScatter in a host", [&](ncclComm_t comm, cudaStream_t stream) {
    if (areEqual(parts)) {
      return api_.reduceScatter(sums.data_ptr(), ownSum.data_ptr(), static_cast<size_t>(ownSum.numel()), dtype, ncclSum,
                                comm, stream);
    }
    std::vector<std::function<ncclResult_t()>> calls;
    for (size_t root = 0; root < parts.size(); ++root) {
      if (parts[root] == 0) continue;
      calls.emplace_back([&, root] {
        std::byte* const data = regions[root].data;
        return api_.reduce(data, data, static_cast<size_t>(parts[root]), dtype, ncclSum, static_cast<int>(root), comm,
                           stream);
      });
    }
    return enqueueTogether(calls);
  });
  for (size_t i = 0; i < parts.size(); ++i) countSentTo(hostRanks()[i], static_cast<int64_t>(regions[i].size));
  divide(ownSum, divisor);
  if (!sums.is_same(flat)) ownPartInHost(flat, parts).copy_(ownSum);
}

void NcclCommunicator::allGatherInHost(at::Tensor& flat, const Splits& parts) {
  if (flat.numel() == 0 || parts.size() == 1) return;
  const std::vector<Region> regions = regionsOf(flat, parts);
  const Region& own = regions[topology().localRank(rank())];
  onComm(inHost(), "ncclAllGather in a host", [&](ncclComm_t comm, cudaStream_t stream) {
    if (areEqual(parts)) return api_.allGather(own.data, flat.data_ptr(), own.size, ncclUint8, comm, stream);
    std::vector<std::function<ncclResult_t()>> calls;
    for (size_t root = 0; root < parts.size(); ++root) {
      const Region region = regions[root];
      if (region.size == 0) continue;
      calls.emplace_back([=, this] {
        return api_.broadcast(region.data, region.data, region.size, ncclUint8, static_cast<int>(root), comm, stream);
      });
    }
    return enqueueTogether(calls);
  });
  for (const int peer : hostRanks()) countSentTo(peer, static_cast<int64_t>(own.size));
}

void NcclCommunicator::exchange(const std::vector<Message>& messages) {
  onComm("ncclSend/ncclRecv",
         [&](ncclComm_t comm, cudaStream_t stream) { return enqueueMessages(messages, comm, stream); });
  countSentIn(messages);
}

void NcclCommunicator::countSentIn(const std::vector<Message>& messages) {
  for (const auto& message : messages) {
    if (message.isSend) countSentTo(message.peer, sizeOf(message.tensor));
  }
}

void NcclCommunicator::barrier() {
  // Made anew: memory from the pool of a graph that is being captured is not for calls outside of it.
  const at::Tensor token = at::zeros({1}, at::TensorOptions().dtype(at::kByte).device(environment_.device));
  onComm("ncclAllReduce (barrier)", [&](ncclComm_t comm, cudaStream_t stream) {
    return api_.allReduce(token.data_ptr(), token.data_ptr(), 1, ncclUint8, ncclMax, comm, stream);
  });
}

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#include "backend/c10d/piecewise_communicator.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>

#include "backend/tensor_bytes.h"

namespace bagua {
namespace {

constexpr int64_t kPieceBytes = int64_t{256} << 10;
// Pieces for and from each rank that are under way at a time.
constexpr size_t kWindow = 2;
// Keeps our messages apart from the users', who count from 0.
constexpr int kTag = 0x6261'6775;

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

// Empty past the end.
at::Tensor pieceOf(const at::Tensor& bytes, int64_t index) {
  const int64_t begin = std::min(index * kPieceBytes, bytes.numel());
  return bytes.narrow(0, begin, std::min(kPieceBytes, bytes.numel() - begin));
}

}  // namespace

void PiecewiseCommunicator::allGather(at::Tensor& output, const at::Tensor& input) {
  at::Tensor sent = bytesOf(input);
  if (sent.numel() <= kPieceBytes) return BackendCommunicator::allGather(output, input);
  at::Tensor received = bytesOf(output);
  std::vector<Exchange> exchanges;
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    exchanges.push_back({peer, sent, received.narrow(0, peer * sent.numel(), sent.numel())});
  }
  received.narrow(0, rank() * sent.numel(), sent.numel()).copy_(sent);
  swap(exchanges);
  countSentToEach(sent.numel());
}

void PiecewiseCommunicator::allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                                     const Splits& inputSplits) {
  const at::Tensor sent = bytesOf(input);
  // Of uneven parts no rank knows the largest, but both ends of each know its size: always messages.
  if (inputSplits.empty() && outputSplits.empty() && sent.numel() / size() <= kPieceBytes) {
    return BackendCommunicator::allToAll(output, input, outputSplits, inputSplits);
  }
  const at::Tensor received = bytesOf(output);
  const auto itemSize = static_cast<int64_t>(input.element_size());
  const Splits in = inputSplits.empty() ? Splits(size(), input.numel() / size()) : inputSplits;
  const Splits out = outputSplits.empty() ? Splits(size(), output.numel() / size()) : outputSplits;
  std::vector<Exchange> exchanges;
  int64_t sentBegin = 0;
  int64_t receivedBegin = 0;
  for (int peer = 0; peer < size(); ++peer) {
    Exchange exchange{peer, sent.narrow(0, sentBegin * itemSize, in[peer] * itemSize),
                      received.narrow(0, receivedBegin * itemSize, out[peer] * itemSize)};
    sentBegin += in[peer];
    receivedBegin += out[peer];
    if (peer == rank()) {
      exchange.received.copy_(exchange.sent);
    } else {
      exchanges.push_back(std::move(exchange));
    }
  }
  // Not all to the same rank first.
  std::rotate(exchanges.begin(), exchanges.begin() + rank(), exchanges.end());
  swap(exchanges);
  countSentParts(input, in);
}

void PiecewiseCommunicator::swap(const std::vector<Exchange>& exchanges) {
  int64_t largest = 0;
  for (const auto& exchange : exchanges) {
    largest = std::max({largest, exchange.sent.numel(), exchange.received.numel()});
  }
  std::deque<Works> underWay;
  const auto finishOldest = [&] {
    for (const auto& work : underWay.front()) {
      TORCH_CHECK_WITH(DistNetworkError, work->wait(remaining()), "the exchange was aborted");
    }
    underWay.pop_front();
  };
  for (int64_t index = 0; index * kPieceBytes < largest; ++index) {
    Works works;
    for (const auto& exchange : exchanges) {
      std::vector<at::Tensor> piece{pieceOf(exchange.received, index)};
      if (piece[0].numel() > 0) works.push_back(backend().recv(piece, exchange.peer, kTag));
    }
    for (const auto& exchange : exchanges) {
      std::vector<at::Tensor> piece{pieceOf(exchange.sent, index)};
      if (piece[0].numel() > 0) works.push_back(backend().send(piece, exchange.peer, kTag));
    }
    underWay.push_back(std::move(works));
    if (underWay.size() > kWindow) finishOldest();
  }
  while (!underWay.empty()) finishOldest();
}

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/gloo/backend_wire.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>

namespace bagua {
namespace {

constexpr int64_t kPieceBytes = Wire::kPieceBytes;
// Pieces for and from each rank that are under way at a time: of those that are made on the way few, so that the first
// leaves early; of others as many as keep a fast line busy while this thread waits for its core. With three of them,
// gradient_allreduce of 42 MB at 10 Gbit/s takes a step of 142 ms instead of 125.
constexpr size_t kWindowOfMade = 3;
constexpr size_t kWindow = 8;
// Keeps our messages apart from the users', who count from 0.
constexpr int kExchangeTag = 0x6261'6775;

int64_t largestOf(const Wire::Exchanges& exchanges) {
  int64_t largest = 0;
  for (const auto& exchange : exchanges) {
    largest = std::max({largest, exchange.sent.numel(), exchange.incomingBytes()});
  }
  return largest;
}

std::chrono::milliseconds timeUntil(Wire::Deadline deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  // Transports take 0 for "no limit".
  return std::max(left, std::chrono::milliseconds(1));
}

}  // namespace

BackendWire::BackendWire(c10::intrusive_ptr<c10d::Backend> backend, int channel, std::shared_ptr<PeerWatch> watch)
    : Wire(backend->getRank(), backend->getSize()),
      backend_(std::move(backend)),
      tag_(kExchangeTag + channel),
      watch_(std::move(watch)) {}

// All ranks start the pieces in the same order, for messages between two of them are told apart by nothing else: it
// follows from the number of pieces alone.
void BackendWire::exchangeInPieces(const Exchanges& exchanges, const Pipeline& pipeline, const Exchanges& forwarded,
                                   Deadline deadline) {
  struct Piece {
    int64_t begin;
    int64_t end;
    Works works;
  };
  std::deque<Piece> underWay;
  std::deque<Piece> forwardedUnderWay;
  const size_t window = pipeline.beforeSending ? kWindowOfMade : kWindow;
  const auto finishOldest = [&](std::deque<Piece>& pieces) {
    Piece piece = std::move(pieces.front());
    pieces.pop_front();
    finish(piece.works, deadline);
    return piece;
  };
  const auto forwardOldest = [&] {
    const Piece piece = finishOldest(underWay);
    if (pipeline.afterReceiving) pipeline.afterReceiving(piece.begin, piece.end);
    if (forwarded.empty()) return;
    forwardedUnderWay.push_back({piece.begin, piece.end, start(forwarded, piece.begin / kPieceBytes)});
    if (forwardedUnderWay.size() >= window) finishOldest(forwardedUnderWay);
  };
  const int64_t largest = largestOf(exchanges);
  for (int64_t begin = 0; begin < largest; begin += kPieceBytes) {
    const int64_t end = std::min(begin + kPieceBytes, largest);
    if (pipeline.beforeSending) pipeline.beforeSending(begin, end);
    underWay.push_back({begin, end, start(exchanges, begin / kPieceBytes)});
    if (underWay.size() >= window) forwardOldest();
  }
  while (!underWay.empty()) forwardOldest();
  while (!forwardedUnderWay.empty()) finishOldest(forwardedUnderWay);
}

BackendWire::Works BackendWire::start(const Exchanges& exchanges, int64_t piece) {
  const int64_t begin = piece * kPieceBytes;
  Works works;
  // Under the lock, so that abort() finds all that has been started. Receiving first: what comes has a place to go.
  const std::lock_guard<std::mutex> lock(mutex_);
  checkNotAborted();
  for (const auto& exchange : exchanges) {
    std::vector<at::Tensor> received{
        Wire::pieceOf(exchange.received, exchange.incomingBytes(), begin, begin + kPieceBytes)};
    if (exchange.peer == rank()) {
      received[0].copy_(Wire::pieceOf(exchange.sent, exchange.sent.numel(), begin, begin + kPieceBytes));
    } else if (received[0].numel() > 0) {
      works.push_back(backend_->recv(received, exchange.peer, tag_));
    }
  }
  for (const auto& exchange : exchanges) {
    std::vector<at::Tensor> sent{Wire::pieceOf(exchange.sent, exchange.sent.numel(), begin, begin + kPieceBytes)};
    if (exchange.peer != rank() && sent[0].numel() > 0) works.push_back(backend_->send(sent, exchange.peer, tag_));
  }
  underWay_.insert(underWay_.end(), works.begin(), works.end());
  return works;
}

void BackendWire::finish(const Works& works, Deadline deadline) {
  for (const auto& work : works) {
    const bool hasEnded = work->wait(timeUntil(deadline));
    TORCH_CHECK_WITH(DistNetworkError, hasEnded, "the exchange was aborted");
  }
  // Not the last that hold them: a tensor that Python knows may go with them, and that must not be under the lock.
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(underWay_,
                [&](const auto& work) { return std::find(works.begin(), works.end(), work) != works.end(); });
}

void BackendWire::checkNotAborted() const {
  TORCH_CHECK_WITH(DistNetworkError, !isAborted_, "the exchange was aborted");
}

void BackendWire::abort() {
  if (watch_) watch_->leave();
  Works interrupted;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    isAborted_ = true;
    interrupted = underWay_;
  }
  for (const auto& work : interrupted) work->abort();
}

}  // namespace bagua

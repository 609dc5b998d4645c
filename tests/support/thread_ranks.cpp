// SPDX-License-Identifier: Apache-2.0
#include "tests/support/thread_ranks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "backend/cpu/collectives/cpu_communicator.h"
#include "backend/cpu/socket_wire.h"

namespace bagua::testing {
namespace {

// Messages on their way between the threads, and the first error.
class Mailboxes {
 public:
  explicit Mailboxes(int size) : size_(size), changed_(size), boxes_(static_cast<size_t>(size) * size) {}

  void send(int from, int to, const at::Tensor& bytes) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      box(from, to).push_back(bytes.clone());
    }
    changed_[to].notify_all();
  }

  at::Tensor receive(int from, int to) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_[to].wait(lock, [&] { return !box(from, to).empty() || failed_; });
    TORCH_CHECK(!box(from, to).empty(), "a peer has failed");
    const at::Tensor bytes = box(from, to).front();
    box(from, to).pop_front();
    return bytes;
  }

  // Keeps the first error and wakes everybody.
  void fail(std::exception_ptr error) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!failed_) first_ = std::move(error);
      failed_ = true;
    }
    for (auto& changed : changed_) changed.notify_all();
  }

  void rethrowFirst() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::deque<at::Tensor>& box(int from, int to) { return boxes_[static_cast<size_t>(from) * size_ + to]; }

  const int size_;
  std::mutex mutex_;
  // By receiver.
  std::vector<std::condition_variable> changed_;
  std::vector<std::deque<at::Tensor>> boxes_;
  bool failed_ = false;
  std::exception_ptr first_;
};

// Pieces of an odd size, so that tests see several and the last one short.
constexpr int64_t kPieceBytes = 24'000;

// Bytes [begin, end) of a message of `total` bytes, of which a piece is no longer than kPieceBytes: `bytes` holds it,
// or is filled with it again and again. Empty past the end.
at::Tensor pieceOf(const at::Tensor& bytes, int64_t total, int64_t begin, int64_t end) {
  const int64_t first = std::min(begin, total);
  const int64_t length = std::min(end, total) - first;
  if (length == 0) return bytes.narrow(0, 0, 0);
  return bytes.narrow(0, first % bytes.numel(), length);
}

class ThreadWire final : public Wire {
 public:
  using Lines = std::function<Line(int rank, int peer)>;
  ThreadWire(int rank, int size, Mailboxes& mail, Lines lines)
      : Wire(rank, size), mail_(mail), lines_(std::move(lines)) {}

  void exchangeInPieces(const Exchanges& exchanges, const Pipeline& pipeline, const Exchanges& forwarded,
                        Deadline /*deadline*/) override {
    int64_t largest = 0;
    for (const auto& exchange : exchanges) {
      largest = std::max({largest, exchange.sent.numel(), exchange.incomingBytes()});
    }
    for (int64_t begin = 0; begin < largest; begin += kPieceBytes) {
      const int64_t end = std::min(begin + kPieceBytes, largest);
      if (pipeline.beforeSending) pipeline.beforeSending(begin, end);
      exchangePiece(exchanges, begin, end);
      if (pipeline.afterReceiving) pipeline.afterReceiving(begin, end);
      exchangePiece(forwarded, begin, end);
    }
  }

  // Its ranks are in one program, and none refuses: what our own wire finds out is tested over that.
  void setProgram(const ProgramFingerprint& /*program*/) override {}
  void compareAgain() override {}
  void refuse(int refusing) override { TORCH_CHECK(false, "rank ", refusing, " refuses, which nobody here hears"); }
  [[nodiscard]] Line lineTo(int peer) override { return lines_ ? lines_(rank(), peer) : Line{}; }
  void abort() override { mail_.fail(std::make_exception_ptr(std::runtime_error("aborted"))); }

 private:
  void exchangePiece(const Exchanges& exchanges, int64_t begin, int64_t end) {
    for (const auto& exchange : exchanges) {
      const at::Tensor sent = pieceOf(exchange.sent, exchange.sent.numel(), begin, end);
      if (sent.numel() > 0) mail_.send(rank(), exchange.peer, sent);
    }
    for (const auto& exchange : exchanges) {
      at::Tensor received = pieceOf(exchange.received, exchange.incomingBytes(), begin, end);
      if (received.numel() == 0) continue;
      const at::Tensor bytes = mail_.receive(exchange.peer, rank());
      TORCH_CHECK(bytes.numel() == received.numel(), "rank ", rank(), " expects ", received.numel(), " bytes of rank ",
                  exchange.peer, ", which sends ", bytes.numel());
      received.copy_(bytes);
    }
  }

  Mailboxes& mail_;
  const Lines lines_;
};

using MakeWire = std::function<std::unique_ptr<Wire>(int rank)>;

void runOver(Mailboxes& mail, const MakeWire& makeWire, const std::vector<std::string>& hosts,
             const std::function<void(Communicator&)>& body) {
  const auto topology = std::make_shared<const HostTopology>(hosts);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < topology->size(); ++rank) {
    ranks.emplace_back([&, rank] {
      CpuCommunicator communicator(makeWire(rank), topology);
      try {
        body(communicator);
      } catch (...) {
        mail.fail(std::current_exception());
        communicator.abort();
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  mail.rethrowFirst();
}

}  // namespace

void runRanks(int size, const std::function<void(Communicator&)>& body, std::vector<std::string> hosts,
              const std::function<Wire::Line(int rank, int peer)>& lines) {
  if (hosts.empty()) hosts.assign(size, "host");
  Mailboxes mail(size);
  runOver(
      mail, [&](int rank) { return std::make_unique<ThreadWire>(rank, size, mail, lines); }, hosts, body);
}

void runRanksOverSockets(const std::function<void(Communicator&)>& body, const std::vector<std::string>& hosts) {
  const auto size = static_cast<int>(hosts.size());
  std::vector<std::shared_ptr<net::Transport>> transports;
  std::vector<net::ProcessAddress> addresses;
  for (int rank = 0; rank < size; ++rank) {
    transports.push_back(net::Transport::listenAt("127.0.0.1", 2));
    addresses.push_back(transports.back()->address());
  }
  // For the first error.
  Mailboxes mail(size);
  runOver(
      mail, [&](int rank) { return std::make_unique<SocketWire>(transports[rank]->join(7, rank, addresses)); }, hosts,
      body);
}

}  // namespace bagua::testing

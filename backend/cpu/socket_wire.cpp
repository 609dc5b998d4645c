// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/socket_wire.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "backend/cpu/peer_loss.h"
#include "backend/cpu/preamble.h"
#include "backend/operation/peer_errors.h"

namespace bagua {
namespace {

// How long a rank that is about to raise what its peers should raise too waits for its preambles to leave.
constexpr std::chrono::seconds kPartingTime{2};

std::string nameOf(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

// One exchangeInPieces().
class SocketWire::Call {
 public:
  Call(SocketWire& wire, const Exchanges& exchanges, const Pipeline& pipeline, const Exchanges& forwarded,
       Deadline deadline)
      : wire_(wire), pipeline_(pipeline), deadline_(deadline), hasForwarded_(!forwarded.empty()) {
    for (const auto& exchange : exchanges) {
      largest_ = std::max({largest_, exchange.sent.numel(), exchange.incomingBytes()});
    }
    prepareComparisons(exchanges);
    expect(exchanges, transfers_);
    expect(forwarded, forwarded_);
    send(exchanges, transfers_, pipeline.beforeSending ? 0 : largest_);
    send(forwarded, forwarded_, 0);
  }

  void run() {
    while (true) {
      const uint64_t count = wire_.signal_->count();
      check();
      const bool hasMade = make();
      const bool hasUsed = use();
      if (hasMade || hasUsed) continue;
      if (isDone()) return;
      const bool isInTime = wire_.signal_->waitPast(count, deadline_);
      TORCH_CHECK_WITH(DistNetworkError, isInTime, "timed out: nothing more came from, or went to, ", missing());
    }
  }

 private:
  struct Transfer {
    const Exchange* exchange;
    bool isSent = false;
    uint32_t sentIndex = 0;
    // The preamble, where this message brings it.
    std::vector<uint8_t> context = {};
    std::unique_ptr<net::Group::Sending> sending = nullptr;
    std::unique_ptr<net::Group::Receiving> receiving = nullptr;
    // Of what has gone, the bytes from the beginning that the caller may change.
    uint64_t released = 0;
    // Where the message that comes brings the peer's preamble, until that has been compared.
    std::optional<Preamble> uncompared = std::nullopt;
  };

  // Of the peers that are compared with in this call: what is said and heard once, with the first message each way.
  struct Comparison {
    Preamble own;
    bool isSaid = false;
    bool isHeard = false;
  };

  void prepareComparisons(const Exchanges& exchanges) {
    for (const auto& exchange : exchanges) {
      if (exchange.peer == wire_.rank() || wire_.isCompared_[exchange.peer]) continue;
      auto& own = comparisons_[exchange.peer].own;
      own.program = wire_.program_;
      own.refusing = wire_.refusing_;
      own.sent += exchange.sent.numel();
      own.expected += exchange.incomingBytes();
    }
    for (const auto& [peer, comparison] : comparisons_) wire_.isCompared_[peer] = true;
  }

  // Null: nothing is to be compared with the peer, or has been said, or heard, already.
  Comparison* comparisonWith(int peer) {
    const auto found = comparisons_.find(peer);
    return found == comparisons_.end() ? nullptr : &found->second;
  }

  void expect(const Exchanges& exchanges, std::vector<Transfer>& transfers) {
    transfers.reserve(exchanges.size());
    for (const auto& exchange : exchanges) {
      auto& transfer = transfers.emplace_back(Transfer{.exchange = &exchange});
      if (exchange.peer == wire_.rank()) continue;
      auto* const comparison = comparisonWith(exchange.peer);
      // Where nothing goes, or comes, an empty message brings the preamble.
      const bool isSaid = comparison && !comparison->isSaid && (exchange.sent.numel() > 0 || comparison->own.sent == 0);
      if (isSaid) {
        comparison->isSaid = true;
        transfer.context = net::bytesOf(comparison->own);
      }
      transfer.isSent = isSaid || exchange.sent.numel() > 0;
      if (transfer.isSent) transfer.sentIndex = wire_.sent_[exchange.peer]++;
      const bool isHeard =
          comparison && !comparison->isHeard && (exchange.incomingBytes() > 0 || comparison->own.expected == 0);
      if (!isHeard && exchange.incomingBytes() == 0) continue;
      net::Place place{.data = static_cast<uint8_t*>(exchange.received.data_ptr()),
                       .size = static_cast<uint64_t>(exchange.incomingBytes()),
                       .room = static_cast<uint64_t>(exchange.received.numel()),
                       .signal = wire_.signal_,
                       .tellsProgress = pipeline_.afterReceiving || hasForwarded_};
      if (isHeard) {
        comparison->isHeard = true;
        transfer.uncompared = comparison->own;
        place.accepts = [own = comparison->own](const std::vector<uint8_t>& context) {
          const auto theirs = net::fromBytes<Preamble>(context);
          return theirs && fits(own, *theirs);
        };
      }
      const uint32_t index = wire_.received_[exchange.peer]++;
      transfer.receiving = wire_.group_->receive(exchange.peer, stream(), index, std::move(place));
    }
  }

  void send(const Exchanges& exchanges, std::vector<Transfer>& transfers, int64_t ready) {
    for (size_t i = 0; i < exchanges.size(); ++i) {
      const auto& exchange = exchanges[i];
      auto& transfer = transfers[i];
      if (!transfer.isSent) continue;
      net::Message message{.data = static_cast<const uint8_t*>(exchange.sent.const_data_ptr()),
                           .size = static_cast<uint64_t>(exchange.sent.numel()),
                           .ready = static_cast<uint64_t>(std::min(ready, exchange.sent.numel())),
                           .context = transfer.context,
                           .tellsProgress = static_cast<bool>(pipeline_.afterReceiving),
                           .signal = wire_.signal_};
      transfer.sending = wire_.group_->send(exchange.peer, stream(), transfer.sentIndex, std::move(message));
    }
  }

  [[nodiscard]] uint64_t stream() const { return wire_.program_.sequence; }

  // The next piece, just before it leaves. False: there is none.
  bool make() {
    if (made_ >= largest_) return false;
    const int64_t end = pipeline_.beforeSending ? std::min(made_ + kPieceBytes, largest_) : largest_;
    if (pipeline_.beforeSending) pipeline_.beforeSending(made_, end);
    for (auto& transfer : transfers_) {
      const auto& exchange = *transfer.exchange;
      if (exchange.peer == wire_.rank()) {
        const int64_t size = exchange.sent.numel();
        const int64_t from = std::min(made_, size);
        const int64_t length = std::min(end, size) - from;
        at::Tensor received = exchange.received;
        if (length > 0) received.narrow(0, from, length).copy_(exchange.sent.narrow(0, from, length));
      } else if (pipeline_.beforeSending && transfer.sending) {
        transfer.sending->makeReady(std::min<uint64_t>(end, exchange.sent.numel()));
      }
    }
    made_ = end;
    return true;
  }

  // The next piece that has come and gone everywhere. False: it has not.
  bool use() {
    if (used_ >= made_) return false;
    const bool isInPieces = pipeline_.afterReceiving || hasForwarded_;
    const int64_t end = isInPieces ? std::min(used_ + kPieceBytes, made_) : made_;
    while (current_ < transfers_.size() && has(transfers_[current_], end)) ++current_;
    if (current_ < transfers_.size()) return false;
    // Nothing is used of a program that differs. A rank that refuses has to be heard of by all.
    if (hasUncompared()) return false;
    if (refusing_ >= 0) throwRefused(refusing_);
    if (pipeline_.afterReceiving || hasForwarded_) {
      for (const auto& transfer : transfers_) release(transfer, end);
    }
    if (pipeline_.afterReceiving) pipeline_.afterReceiving(used_, end);
    for (auto& transfer : transfers_) {
      if (transfer.receiving) transfer.receiving->use(static_cast<uint64_t>(end));
    }
    for (auto& transfer : forwarded_) {
      const auto ready = static_cast<uint64_t>(std::min(end, transfer.exchange->sent.numel()));
      if (transfer.sending) transfer.sending->makeReady(ready);
    }
    used_ = end;
    current_ = 0;
    return true;
  }

  // The step may change what has been sent up to `end`.
  static void release(const Transfer& transfer, int64_t end) {
    if (!transfer.sending || transfer.exchange->isKept) return;
    const auto changing = static_cast<uint64_t>(std::min(end, transfer.exchange->sent.numel()));
    if (transfer.released < changing) transfer.sending->release(changing);
  }

  // Whether bytes up to `end` have come and gone.
  bool has(Transfer& transfer, int64_t end) {
    const auto& exchange = *transfer.exchange;
    if (transfer.receiving) {
      const auto state = transfer.receiving->state();
      const auto wanted = static_cast<uint64_t>(std::min(end, exchange.incomingBytes()));
      if (!state.hasContext || state.arrived < wanted) {
        throwIfOver(transfer, state.error);
        return false;
      }
    }
    if (transfer.sending) {
      const auto state = transfer.sending->state();
      const auto wanted = static_cast<uint64_t>(std::min(end, exchange.sent.numel()));
      const auto all = static_cast<uint64_t>(exchange.sent.numel());
      if (wanted == all ? !state.isComplete : state.gone < wanted) {
        throwIfOver(transfer, state.error);
        return false;
      }
      transfer.released = state.released;
    }
    return true;
  }

  bool isDone() {
    // What has come since use() looked is still to be used.
    if (used_ < largest_) return false;
    while (current_ < transfers_.size() && has(transfers_[current_], largest_)) ++current_;
    if (current_ < transfers_.size() || hasUncompared()) return false;
    if (refusing_ >= 0) throwRefused(refusing_);
    while (currentForwarded_ < forwarded_.size()) {
      auto& transfer = forwarded_[currentForwarded_];
      const auto& exchange = *transfer.exchange;
      if (!has(transfer, std::max(exchange.sent.numel(), exchange.incomingBytes()))) return false;
      ++currentForwarded_;
    }
    return true;
  }

  [[nodiscard]] bool hasUncompared() const {
    return std::ranges::any_of(transfers_, [](const Transfer& transfer) { return transfer.uncompared.has_value(); });
  }

  // What peers have said, and whether to go on.
  void check() {
    TORCH_CHECK_WITH(DistNetworkError, !wire_.isAborted_, "the exchange was aborted");
    for (auto& transfer : transfers_) {
      if (!transfer.uncompared) continue;
      const auto state = transfer.receiving->state();
      if (!state.hasContext) {
        // Also where this rank waits for another first.
        throwIfOver(transfer, state.error);
        continue;
      }
      compare(*transfer.uncompared, transfer);
      transfer.uncompared.reset();
    }
    if (refusing_ >= 0 || wire_.refusing_ >= 0) {
      if (hasUncompared()) return;
      part();
      throwRefused(refusing_ >= 0 ? refusing_ : wire_.refusing_);
    }
  }

  void compare(const Preamble& own, const Transfer& transfer) {
    const int rank = wire_.rank();
    const int peer = transfer.exchange->peer;
    const auto theirs = net::fromBytes<Preamble>(transfer.receiving->context());
    try {
      if (!theirs) {
        BAGUA_THROW(MismatchError, nameOf(peer), " sends messages that are not of this version of bagua. Install the ",
                    "same version on all hosts");
      }
      const bool isLower = rank < peer;
      checkSameProgram(isLower ? own.program : theirs->program, nameOf(std::min(rank, peer)),
                       isLower ? theirs->program : own.program, nameOf(std::max(rank, peer)));
      if (theirs->refusing >= 0) {
        refusing_ = static_cast<int>(theirs->refusing);
      } else if (own.refusing < 0) {
        checkSize(rank, own.sent, peer, theirs->expected);
        checkSize(peer, theirs->sent, rank, own.expected);
      }
    } catch (const MismatchError&) {
      part();
      throw;
    }
  }

  void checkSize(int sender, int64_t sent, int receiver, int64_t expected) const {
    const auto dtype = static_cast<at::ScalarType>(wire_.program_.dtype);
    const bool hasItems = dtype >= at::ScalarType::Byte && dtype < at::ScalarType::Undefined;
    checkSameSize(sender, sent, receiver, expected, hasItems ? static_cast<int64_t>(at::elementSize(dtype)) : 0);
  }

  // This rank is about to raise what its peers should raise too: lets its preambles leave.
  void part() {
    const auto end = std::chrono::steady_clock::now() + kPartingTime;
    for (const auto& transfer : transfers_) {
      if (transfer.context.empty() || !transfer.sending) continue;
      while (true) {
        const uint64_t count = wire_.signal_->count();
        const auto state = transfer.sending->state();
        if (state.hasContextGone || !state.error.empty()) break;
        // Of a frame that has gone nobody tells before the message is complete.
        const auto soon = std::chrono::steady_clock::now() + std::chrono::milliseconds(5);
        wire_.signal_->waitPast(count, std::min(soon, end));
        if (std::chrono::steady_clock::now() >= end) return;
      }
    }
  }

  void throwIfOver(const Transfer& transfer, const std::string& error) {
    throwIfLost(*wire_.group_, transfer.exchange->peer, error);
  }

  // For an error: who has not come.
  std::string missing() {
    std::string names;
    for (auto* const transfers : {&transfers_, &forwarded_}) {
      for (auto& transfer : *transfers) {
        const auto& exchange = *transfer.exchange;
        const bool isThere = has(transfer, std::max(exchange.sent.numel(), exchange.incomingBytes()));
        const std::string name = nameOf(exchange.peer);
        if (!isThere && names.find(name) == std::string::npos) names += (names.empty() ? "" : ", ") + name;
      }
    }
    return names;
  }

  SocketWire& wire_;
  const Pipeline& pipeline_;
  const Deadline deadline_;
  const bool hasForwarded_;
  std::map<int, Comparison> comparisons_;
  std::vector<Transfer> transfers_;
  std::vector<Transfer> forwarded_;
  // Bytes of every message: of the longest, that have been made, and used.
  int64_t largest_ = 0;
  int64_t made_ = 0;
  int64_t used_ = 0;
  // The first that has not all that is waited for.
  size_t current_ = 0;
  size_t currentForwarded_ = 0;
  // Whom a peer has named as refusing its arguments.
  int refusing_ = -1;
};

SocketWire::SocketWire(std::shared_ptr<net::Group> group)
    : Wire(group->rank(), group->size()),
      group_(std::move(group)),
      sent_(size(), 0),
      received_(size(), 0),
      isCompared_(size(), false) {}

void SocketWire::setProgram(const ProgramFingerprint& program) {
  // What may still come of the last one nobody waits for.
  if (isInProgram_ && program.sequence != program_.sequence) group_->retire(program_.sequence);
  isInProgram_ = true;
  program_ = program;
  refusing_ = -1;
  std::ranges::fill(sent_, 0);
  std::ranges::fill(received_, 0);
  compareAgain();
}

void SocketWire::exchangeInPieces(const Exchanges& exchanges, const Pipeline& pipeline, const Exchanges& forwarded,
                                  Deadline deadline) {
  Call(*this, exchanges, pipeline, forwarded, deadline).run();
}

Wire::Line SocketWire::lineTo(int peer) {
  const auto line = group_->lineTo(peer);
  return {.delay = line.roundTrip / 2, .bytesPerSecond = line.bytesPerSecond};
}

void SocketWire::abort() {
  isAborted_ = true;
  signal_->notify();
  group_->leave();
}

}  // namespace bagua

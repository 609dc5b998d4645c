// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/messages.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "backend/cpu/peer_loss.h"
#include "backend/operation/peer_errors.h"
#include "backend/operation/timeouts.h"

namespace bagua {
namespace {

// Streams below are those of programs.
constexpr uint64_t kMessages = uint64_t{1} << 63U;
constexpr uint64_t kNumbered = uint64_t{1} << 62U;

// Of what the group may send unasked: what is sent long before anybody receives it does not slow the programs down.
constexpr uint64_t kMaxUnsolicited = net::kUnsolicitedBytes / 2;

// A receive from any rank fails when nobody is left. To notice that, a rank connects to all others, which larger groups
// do without.
constexpr int kMostWatched = 64;

// Works that are looked through for those that are over.
constexpr size_t kLeastWorksToSearch = 16;

uint64_t streamOf(int tag) { return kMessages | static_cast<uint32_t>(tag); }

}  // namespace

void Messages::State::watchAll() {
  if (group->size() > kMostWatched) return;
  std::call_once(watched, [this] {
    for (int peer = 0; peer < group->size(); ++peer) {
      if (peer != group->rank()) group->watchLeave(peer);
    }
  });
}

class Messages::Message : public c10d::Work {
 public:
  Message(std::shared_ptr<State> state, at::Tensor bytes)
      : Work(-1, c10d::OpType::UNKNOWN), state_(std::move(state)), bytes_(std::move(bytes)) {}

  // Looks, and does what can be done without waiting. Throws what has gone wrong.
  virtual bool advance() = 0;

  bool isCompleted() override {
    try {
      return isAborted_ || advance();
    } catch (...) {
      // wait() tells.
      return true;
    }
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const auto deadline =
        std::chrono::steady_clock::now() + (timeout == kNoTimeout ? kLongestTimeout : limitedTimeout(timeout));
    while (true) {
      const uint64_t count = signal_->count();
      if (isAborted_) return false;
      if (advance()) return true;
      TORCH_CHECK_WITH(DistNetworkError, signal_->waitPast(count, deadline), "timed out waiting for a message");
    }
  }

  void abort() override {
    isAborted_ = true;
    signal_->notify();
  }

  // Others may hold a weak pointer, and the tensor is not to live until they forget it.
  void release_resources() override { bytes_.reset(); }

 protected:
  [[nodiscard]] net::Group& group() const { return *state_->group; }
  [[nodiscard]] uint8_t* data() const { return static_cast<uint8_t*>(bytes_.data_ptr()); }

  const std::shared_ptr<State> state_;
  at::Tensor bytes_;
  const std::shared_ptr<net::Signal> signal_ = std::make_shared<net::Signal>();
  std::atomic<bool> isAborted_ = false;
  // -1: not known yet who sends.
  int peer_ = -1;
};

class Messages::Sent final : public Message {
 public:
  Sent(std::shared_ptr<State> state, const at::Tensor& bytes, int peer, uint64_t stream, uint32_t index)
      : Message(std::move(state), bytes) {
    const auto size = static_cast<uint64_t>(bytes_.numel());
    peer_ = peer;
    sending_ = group().send(
        peer, stream, index,
        {.data = data(), .size = size, .ready = size, .signal = signal_, .maxUnsolicited = kMaxUnsolicited});
  }

  bool advance() override {
    auto state = sending_->state();
    // The rest waits for the peer, which may get it, and leave, between two looks.
    const std::string error = state.isCut ? std::string() : group().errorOf(peer_);
    if (!error.empty()) state = sending_->state();
    throwIfLost(group(), peer_, state.error);
    if (!state.isCut) throwIfLost(group(), peer_, error);
    // The caller may change the tensor now.
    if (state.isComplete) sending_->release(static_cast<uint64_t>(bytes_.numel()));
    return state.isComplete;
  }

  bool wait(std::chrono::milliseconds timeout) override {
    if (!isCompleted()) group().watchErrorOf(peer_, signal_);
    return Message::wait(timeout);
  }

  void release_resources() override {
    sending_.reset();
    Message::release_resources();
  }

 private:
  std::unique_ptr<net::Group::Sending> sending_;
};

class Messages::Received final : public Message {
 public:
  Received(std::shared_ptr<State> state, const at::Tensor& bytes, int tag, bool isUndirected)
      : Message(std::move(state), bytes), tag_(tag), isUndirected_(isUndirected) {}

  // Expects the next message with the tag. The caller holds the state's mutex.
  void expectFrom(int peer) {
    const uint32_t index = state_->received[peer].add(tag_);
    expect(peer, streamOf(tag_), index);
  }

  void expect(int peer, uint64_t stream, uint32_t index) {
    receiving_ = group().receive(peer, stream, index,
                                 {.data = data(), .size = static_cast<uint64_t>(bytes_.numel()), .signal = signal_});
    peer_ = peer;
    group().watchLeave(peer);
  }

  bool advance() override {
    if (isUndirected_ && !hasFoundSender()) return false;
    const auto state = receiving_->state();
    const auto size = static_cast<uint64_t>(bytes_.numel());
    if (state.total && *state.total != size) {
      BAGUA_THROW(MismatchError, "rank ", peer_, " sends a message of ", *state.total, " bytes with tag ", tag_,
                  ", where this rank has a place for ", size, ". A receive has to be as large as its send");
    }
    if (state.isComplete()) return true;
    throwIfLost(group(), peer_, state.error);
    return false;
  }

  int sourceRank() const override { return peer_; }

  void release_resources() override {
    receiving_.reset();
    Message::release_resources();
  }

 private:
  // Returns whether it is known which rank sends. Messages that have begun belong to the receives posted first.
  bool hasFoundSender() {
    // Dropped after the lock: a tensor that Python knows may go with them.
    std::vector<c10::intrusive_ptr<c10d::Work>> first;
    const std::lock_guard<std::mutex> lock(state_->mutex);
    std::vector<net::MessageKey> keys;
    while (!receiving_) {
      keys.clear();
      for (int peer = 0; peer < group().size(); ++peer) {
        if (peer == group().rank()) continue;
        keys.push_back({streamOf(tag_), static_cast<uint32_t>(peer), state_->received[peer].of(tag_)});
      }
      // This comes before a look at the errors, so that one that comes in between notifies.
      const auto begun = group().firstBegun(keys, signal_);
      if (!begun) break;
      const auto place = state_->undirected.find(tag_);
      auto& waiting = place->second;
      while (!first.emplace_back(waiting.front().lock())) waiting.pop_front();
      auto& receive = static_cast<Received&>(*first.back());
      receive.expectFrom(static_cast<int>(begun->source));
      receive.signal_->notify();
      waiting.pop_front();
      if (waiting.empty()) state_->undirected.erase(place);
    }
    if (receiving_) return true;
    std::string lost;
    int lostPeer = -1;
    bool isAnybodyLeft = false;
    for (const auto& key : keys) {
      const std::string error = group().errorOf(static_cast<int>(key.source));
      if (error.empty()) isAnybodyLeft = true;
      if (lost.empty()) {
        lost = error;
        lostPeer = static_cast<int>(key.source);
      }
    }
    // A message may have come since the look at them, before the last rank left; it has notified then.
    const bool isOver = !isAnybodyLeft && !group().firstBegun(keys, signal_);
    if (isOver && lostPeer >= 0) throwIfLost(group(), lostPeer, lost);
    return false;
  }

  const int tag_;
  const bool isUndirected_;
  // It is set under the state's mutex.
  std::unique_ptr<net::Group::Receiving> receiving_;
};

c10::intrusive_ptr<c10d::Work> Messages::send(const at::Tensor& bytes, int peer, int tag) {
  c10::intrusive_ptr<Sent> message;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    message = c10::make_intrusive<Sent>(state_, bytes, peer, streamOf(tag), state_->sent[peer].add(tag));
  }
  return letGo(std::move(message));
}

c10::intrusive_ptr<c10d::Work> Messages::sendNumbered(const at::Tensor& bytes, int peer, uint64_t number) {
  return letGo(c10::make_intrusive<Sent>(state_, bytes, peer, kMessages | kNumbered | number, 0U));
}

c10::intrusive_ptr<c10d::Work> Messages::letGo(c10::intrusive_ptr<Message> message) {
  // Dropped after the lock: a tensor that Python knows may go with them.
  std::vector<c10::intrusive_ptr<c10d::Work>> gone;
  const std::lock_guard<std::mutex> lock(mutex_);
  // Those that have gone in their order at once, the others when there are twice as many.
  while (!leaving_.empty() && leaving_.front()->isCompleted()) {
    gone.push_back(std::move(leaving_.front()));
    leaving_.pop_front();
  }
  if (leaving_.size() >= nextSearch_) {
    std::erase_if(leaving_, [&](const auto& work) {
      if (!work->isCompleted()) return false;
      gone.push_back(work);
      return true;
    });
    nextSearch_ = std::max(2 * leaving_.size(), kLeastWorksToSearch);
  }
  if (!message->isCompleted()) leaving_.push_back(message);
  return message;
}

c10::intrusive_ptr<c10d::Work> Messages::receive(const at::Tensor& bytes, int peer, int tag) {
  auto message = c10::make_intrusive<Received>(state_, bytes, tag, peer < 0);
  if (peer < 0) state_->watchAll();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (peer >= 0) {
    message->expectFrom(peer);
  } else {
    auto& waiting = state_->undirected[tag];
    std::erase_if(waiting, [](const auto& earlier) { return earlier.expired(); });
    waiting.emplace_back(c10::intrusive_ptr<c10d::Work>(message));
  }
  return message;
}

c10::intrusive_ptr<c10d::Work> Messages::receiveNumbered(const at::Tensor& bytes, int peer, uint64_t number) {
  auto message = c10::make_intrusive<Received>(state_, bytes, 0, /*isUndirected=*/false);
  message->expect(peer, kMessages | kNumbered | number, 0);
  return message;
}

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#include "backend/net/incoming.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace bagua::net {
namespace {

constexpr uint32_t kShortFrame = 16U << 10U;

}  // namespace

// Frames that still come of this message will find no entry in the inbox, and are thrown away: so the sender gets
// credit for what nobody has asked for.
Incoming::~Incoming() {
  isCancelled_ = true;
  give(answer());
}

void Incoming::expectAt(Place place) {
  TORCH_INTERNAL_ASSERT(place.room >= std::min(place.size, kEagerBytes), "no room for what comes unasked");
  Answer toSender;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    place_ = std::move(place);
    if (hasContext_) accept();
    toSender = answer();
  }
  give(toSender);
  notify();
}

Incoming::Answer Incoming::answer() {
  if (!budget_ || (!place_ && !isCancelled_)) return {};
  return {.budget = budget_,
          .key = key_,
          .released = std::exchange(charged_, 0),
          .grantsPlace = std::exchange(isAwaited_, false) && !isComplete()};
}

void Incoming::give(const Answer& answer) {
  if (answer.released > 0) answer.budget->release(answer.released);
  if (answer.grantsPlace) answer.budget->grantPlace(answer.key);
}

bool Incoming::chargeFor(const Frame& frame, const std::shared_ptr<UnsolicitedBudget>& budget) {
  if (!budget) return true;
  budget_ = budget;
  key_ = frame.key;
  if (frame.kind == Frame::Kind::kWaiting) isAwaited_ = true;
  if (frame.kind != Frame::Kind::kUnsolicited) return true;
  const uint64_t charge = chargeOf(frame.payloadBytes);
  if (!budget->charge(charge)) return false;
  charged_ += charge;
  return true;
}

void Incoming::accept() {
  isAccepted_ = !place_->accepts || place_->accepts(context_);
  const bool isWanted = isAccepted_ && !isCancelled_ && fits();
  // A frame that is half there is copied too: the bytes that have not come are overwritten when they do.
  if (isWanted && !kept_.empty()) std::memcpy(place_->data, kept_.data(), kept_.size());
  kept_ = {};
}

void Incoming::use(uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  used_ = std::max(used_, bytes);
}

std::shared_ptr<Incoming> Incoming::unwanted() {
  auto message = std::make_shared<Incoming>();
  message->cancel();
  return message;
}

void Incoming::cancel() {
  Answer toSender;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    isCancelled_ = true;
    toSender = answer();
  }
  give(toSender);
}

Incoming::State Incoming::state() {
  const std::lock_guard<std::mutex> lock(mutex_);
  State state{.total = total_, .arrived = 0, .hasContext = hasContext_, .isAccepted = isAccepted_, .error = error_};
  if (!arrived_.empty() && arrived_.begin()->first == 0) state.arrived = arrived_.begin()->second;
  return state;
}

std::vector<uint8_t> Incoming::context() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return context_;
}

bool Incoming::isComplete() const {
  if (!total_ || !hasContext_) return false;
  return *total_ == 0 || (!arrived_.empty() && arrived_.begin()->first == 0 && arrived_.begin()->second == *total_);
}

uint64_t Incoming::allowed() const {
  const uint64_t room = place_ ? used_ + place_->room : 0;
  return std::max(room, kEagerBytes);
}

bool Incoming::begin(const Frame& frame, const std::vector<uint8_t>& context,
                     const std::shared_ptr<UnsolicitedBudget>& budget) {
  Answer toSender;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (total_ && *total_ != frame.total) return false;
    total_ = frame.total;
    const bool isOtherSize = place_ && !fits();
    // A sender stops there until it hears of a place.
    const uint64_t end = frame.offset + frame.payloadBytes;
    if (end > allowed() && !isOtherSize && !isCancelled_) return false;
    // A frame without a place that is not charged was charged before: it comes again, and there is room for it.
    if (!budget && !place_ && !isCancelled_ && end > kept_.size()) return false;
    if (!chargeFor(frame, budget)) return false;
    // A frame that waits brings the context ahead of the frame that has the first bytes.
    if (frame.offset == 0 && !hasContext_) {
      context_ = context;
      hasContext_ = true;
      if (place_) accept();
    }
    const bool isKept = !isCancelled_ && !isOtherSize && !(place_ && hasContext_);
    if (isKept) kept_.resize(std::max<size_t>(kept_.size(), end));
    toSender = answer();
  }
  give(toSender);
  // A waiter may look at the context already. The end of a short frame follows at once, and notifies of it.
  if (frame.offset == 0 && frame.payloadBytes > kShortFrame) notify();
  return true;
}

std::pair<uint8_t*, uint64_t> Incoming::placeOf(uint64_t offset) {
  const uint64_t all = *total_ - offset;
  if (isCancelled_) return {nullptr, all};
  if (!place_ || !hasContext_) {
    // The frame began when another place was known for it.
    if (offset >= kept_.size()) return {nullptr, all};
    return {kept_.data() + offset, kept_.size() - offset};
  }
  // The receiver reports a message that is not what it expects; none of it is written there.
  if (!isAccepted_ || !fits()) return {nullptr, all};
  const uint64_t begin = place_->room >= *total_ ? offset : offset % place_->room;
  return {place_->data + begin, std::min(all, place_->room - begin)};
}

void Incoming::readInto(uint64_t offset, uint64_t size,
                        const std::function<void(uint8_t* place, uint64_t most)>& read) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto [place, most] = placeOf(offset);
  read(place, std::min(size, most));
}

void Incoming::end(const Frame& frame) {
  bool isNews = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    merge(frame.offset, frame.offset + frame.payloadBytes);
    isNews = isComplete() || frame.offset == 0 || (place_ && place_->tellsProgress);
  }
  if (isNews) notify();
}

void Incoming::merge(uint64_t begin, uint64_t end) {
  auto next = arrived_.lower_bound(begin);
  if (next != arrived_.begin() && std::prev(next)->second >= begin) {
    --next;
    begin = next->first;
    end = std::max(end, next->second);
  }
  while (next != arrived_.end() && next->first <= end) {
    end = std::max(end, next->second);
    next = arrived_.erase(next);
  }
  arrived_[begin] = end;
}

void Incoming::fail(const std::string& error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (isComplete() || !error_.empty()) return;
    error_ = error;
  }
  notify();
}

void Incoming::notify() {
  std::shared_ptr<Signal> signal;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (place_) signal = place_->signal;
  }
  if (signal) signal->notify();
}

}  // namespace bagua::net

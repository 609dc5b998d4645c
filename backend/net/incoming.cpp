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

// --- What comes unasked ----------------------------------------------------------------------------------------------

bool Unasked::come(uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  charged_ += bytes;
  return charged_ <= kUnaskedBytes;
}

void Unasked::take(uint64_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    taken_ += bytes;
  }
  tellCredit(kCreditBytes);
}

void Unasked::tellCredit(uint64_t least) {
  uint64_t taken = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (taken_ < least) return;
    taken = std::exchange(taken_, 0);
    charged_ -= taken;
  }
  if (const auto sender = sender_.lock()) sender->tellCredit(group_, taken);
}

void Unasked::tellPlace(const MessageKey& key) {
  if (const auto sender = sender_.lock()) sender->tellPlace(group_, key, kEagerBytes);
}

// --- Incoming --------------------------------------------------------------------------------------------------------

// One that nobody has asked for: what still comes of it finds nobody, and is thrown away.
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
  if (!unasked_ || (!place_ && !isCancelled_)) return {};
  return {.unasked = unasked_,
          .key = key_,
          .taken = std::exchange(charged_, 0),
          .tellsPlace = std::exchange(isAwaited_, false) && !isComplete()};
}

void Incoming::give(const Answer& answer) {
  if (answer.taken > 0) answer.unasked->take(answer.taken);
  if (answer.tellsPlace) answer.unasked->tellPlace(answer.key);
}

bool Incoming::noteUnasked(const Frame& frame, const std::shared_ptr<Unasked>& unasked) {
  if (!unasked) return true;
  unasked_ = unasked;
  key_ = frame.key;
  if (frame.kind == Frame::Kind::kWaiting) isAwaited_ = true;
  if (frame.kind != Frame::Kind::kUnasked) return true;
  const uint64_t charge = chargeOf(frame.payloadBytes);
  if (!unasked->come(charge)) return false;
  charged_ += charge;
  return true;
}

void Incoming::accept() {
  isAccepted_ = !place_->accepts || place_->accepts(context_);
  const bool isWanted = isAccepted_ && !isCancelled_ && *total_ == place_->size;
  // Also of a frame that is half there: what has not come is overwritten when it does.
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

bool Incoming::begin(const Frame& frame, const std::vector<uint8_t>& context, const std::shared_ptr<Unasked>& unasked) {
  Answer toSender;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (total_ && *total_ != frame.total) return false;
    total_ = frame.total;
    const bool isOtherSize = place_ && place_->size != frame.total;
    // A sender stops there until it is told of a place.
    const uint64_t end = frame.offset + frame.payloadBytes;
    if (end > allowed() && !isOtherSize && !isCancelled_) return false;
    if (!noteUnasked(frame, unasked)) return false;
    // One that waits brings it ahead of the frame that has the first bytes.
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
  // Who is told of a beginning may look at what is known of it already. Of a short frame its end tells, which follows
  // at once: waking a thread costs more than all else that is done with one.
  if (frame.offset == 0 && frame.payloadBytes > kShortFrame) notify();
  return true;
}

std::pair<uint8_t*, uint64_t> Incoming::placeOf(uint64_t offset) {
  const uint64_t all = *total_ - offset;
  if (isCancelled_) return {nullptr, all};
  if (!place_ || !hasContext_) {
    // A frame that began when another place was known for it.
    if (offset >= kept_.size()) return {nullptr, all};
    return {kept_.data() + offset, kept_.size() - offset};
  }
  // A message that is not what the receiver takes it for is a mistake that it finds; none of it is written there.
  if (!isAccepted_ || place_->size != *total_) return {nullptr, all};
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
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    uint64_t begin = frame.offset;
    uint64_t end = frame.offset + frame.payloadBytes;
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
  notify();
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

// --- Inbox -----------------------------------------------------------------------------------------------------------

std::shared_ptr<Incoming> Inbox::find(const MessageKey& key) {
  std::shared_ptr<Incoming> message;
  std::string error;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& entry = messages_[key];
    if (!entry) entry = std::make_shared<Incoming>();
    message = entry;
    const auto source = sources_.find(key.source);
    if (source != sources_.end()) error = source->second.error;
  }
  if (!error.empty()) message->fail(error);
  return message;
}

std::shared_ptr<Incoming> Inbox::begin(const Frame& frame, const std::vector<uint8_t>& context,
                                       const std::shared_ptr<Answers>& sender) {
  auto message = arriving(frame.key);
  if (!message) message = Incoming::unwanted();
  return message->begin(frame, context, unaskedOf(frame, sender)) ? message : nullptr;
}

std::shared_ptr<Unasked> Inbox::unaskedOf(const Frame& frame, const std::shared_ptr<Answers>& sender) {
  if (frame.kind == Frame::Kind::kData) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& unasked = sources_[frame.key.source].unasked;
  if (!unasked) unasked = std::make_shared<Unasked>(sender, frame.group);
  return unasked;
}

// Null where the receiver has retired the stream.
std::shared_ptr<Incoming> Inbox::arriving(const MessageKey& key) {
  std::shared_ptr<Incoming> message;
  std::vector<std::shared_ptr<Signal>> watching;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (isRetired(key.stream)) return nullptr;
    auto& entry = messages_[key];
    if (entry) return entry;
    entry = std::make_shared<Incoming>();
    message = entry;
    for (const auto& watcher : watchers_) {
      if (auto signal = watcher.lock()) watching.push_back(std::move(signal));
    }
  }
  for (const auto& signal : watching) signal->notify();
  return message;
}

void Inbox::forget(const MessageKey& key) {
  std::shared_ptr<Incoming> forgotten;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = messages_.find(key);
  if (found == messages_.end()) return;
  forgotten = std::move(found->second);
  messages_.erase(found);
}

void Inbox::retire(uint64_t stream) {
  // Dropped without the mutex: those for which nobody had a place give credit.
  std::vector<std::shared_ptr<Incoming>> retired;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto begin = messages_.lower_bound({.stream = stream, .source = 0, .index = 0});
  auto end = begin;
  for (; end != messages_.end() && end->first.stream == stream; ++end) retired.push_back(std::move(end->second));
  messages_.erase(begin, end);
  retired_.insert(stream);
  while (!retired_.empty() && *retired_.begin() == retiredBelow_) {
    retired_.erase(retired_.begin());
    ++retiredBelow_;
  }
}

std::optional<MessageKey> Inbox::firstBegun(const std::vector<MessageKey>& keys,
                                            const std::shared_ptr<Signal>& signal) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& key : keys) {
    if (messages_.contains(key)) return key;
  }
  std::erase_if(watchers_, [](const auto& watcher) { return watcher.expired(); });
  const auto isIt = [&](const auto& watcher) { return watcher.lock() == signal; };
  if (std::none_of(watchers_.begin(), watchers_.end(), isIt)) watchers_.push_back(signal);
  return std::nullopt;
}

void Inbox::failAllOf(uint32_t source, const std::string& error) {
  std::vector<std::shared_ptr<Incoming>> failed;
  std::vector<std::shared_ptr<Signal>> watching;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& known = sources_[source].error;
    if (!known.empty()) return;
    known = error;
    for (const auto& [key, message] : messages_) {
      if (key.source == source) failed.push_back(message);
    }
    for (const auto& watcher : watchers_) {
      if (auto signal = watcher.lock()) watching.push_back(std::move(signal));
    }
  }
  for (const auto& message : failed) message->fail(error);
  for (const auto& signal : watching) signal->notify();
}

std::string Inbox::errorOf(uint32_t source) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = sources_.find(source);
  return known == sources_.end() ? "" : known->second.error;
}

void Inbox::noteLeave(uint32_t source, uint64_t frames, const std::string& error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    sources_[source].lastFrame = frames;
    sources_[source].leaveError = error;
  }
  failIfLeft(source);
}

void Inbox::noteFrame(uint32_t source) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++sources_[source].frames;
  }
  failIfLeft(source);
}

// Frames overtake each other: the last has come when as many have.
void Inbox::failIfLeft(uint32_t source) {
  std::string error;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto& state = sources_[source];
    if (!state.lastFrame || state.frames < *state.lastFrame) return;
    error = state.leaveError;
  }
  failAllOf(source, error);
}

}  // namespace bagua::net

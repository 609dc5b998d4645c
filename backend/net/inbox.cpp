// SPDX-License-Identifier: Apache-2.0
#include "backend/net/inbox.h"

#include <algorithm>
#include <utility>

namespace bagua::net {

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
                                       const std::shared_ptr<FlowControl>& sender) {
  std::shared_ptr<Incoming> message;
  std::shared_ptr<UnsolicitedBudget> budget;
  std::vector<std::shared_ptr<Signal>> woken;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& source = sources_[frame.key.source];
    source.sender = sender.get();
    if (frame.kind != Frame::Kind::kData) {
      if (!source.budget) source.budget = std::make_shared<UnsolicitedBudget>(sender, frame.group);
      budget = source.budget;
    }
    if (!isRetired(frame.key.stream)) {
      auto& entry = messages_[frame.key];
      if (!entry) {
        entry = std::make_shared<Incoming>();
        woken = watching();
      }
      message = entry;
    }
  }
  for (const auto& signal : woken) signal->notify();
  if (!message) message = Incoming::unwanted();
  return message->begin(frame, context, budget) ? message : nullptr;
}

void Inbox::forget(const MessageKey& key) {
  // Destroyed without the mutex: a message that nobody had a place for gives credit.
  std::shared_ptr<Incoming> forgotten;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = messages_.find(key);
  if (found == messages_.end()) return;
  forgotten = std::move(found->second);
  messages_.erase(found);
}

void Inbox::retire(uint64_t stream) {
  // Destroyed without the mutex, as above.
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
  if (std::ranges::none_of(watchers_, isIt)) watchers_.push_back(signal);
  return std::nullopt;
}

std::vector<std::shared_ptr<Signal>> Inbox::watching() const {
  std::vector<std::shared_ptr<Signal>> signals;
  for (const auto& watcher : watchers_) {
    if (auto signal = watcher.lock()) signals.push_back(std::move(signal));
  }
  return signals;
}

void Inbox::failAllOf(uint32_t source, const std::string& error) {
  std::vector<std::shared_ptr<Incoming>> failed;
  std::vector<std::shared_ptr<Signal>> woken;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& known = sources_[source].error;
    if (!known.empty()) return;
    known = error;
    for (const auto& [key, message] : messages_) {
      if (key.source == source) failed.push_back(message);
    }
    woken = watching();
    for (const auto& watcher : std::exchange(sources_[source].watchers, {})) {
      if (auto signal = watcher.lock()) woken.push_back(std::move(signal));
    }
  }
  for (const auto& message : failed) message->fail(error);
  for (const auto& signal : woken) signal->notify();
}

bool Inbox::hasHeardFrom(const FlowControl& sender) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::ranges::any_of(sources_, [&](const auto& entry) { return entry.second.sender == &sender; });
}

void Inbox::failAllOver(const FlowControl& sender, const std::string& error) {
  std::vector<uint32_t> failed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [number, source] : sources_) {
      if (source.sender == &sender) failed.push_back(number);
    }
  }
  for (const uint32_t source : failed) failAllOf(source, error);
}

bool Inbox::uses(const FlowControl& sender, uint32_t source, bool hasAnother) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = sources_.find(source);
  if (known != sources_.end() && known->second.sender == &sender) return true;
  if (hasAnother) return false;
  return std::ranges::any_of(messages_, [&](const auto& entry) { return entry.first.source == source; });
}

std::string Inbox::errorOf(uint32_t source) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = sources_.find(source);
  return known == sources_.end() ? "" : known->second.error;
}

void Inbox::watchErrorOf(uint32_t source, const std::shared_ptr<Signal>& signal) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& known = sources_[source];
  if (!known.error.empty()) return;
  std::erase_if(known.watchers, [&](const auto& watcher) {
    const auto watching = watcher.lock();
    return !watching || watching == signal;
  });
  known.watchers.push_back(signal);
}

void Inbox::noteAsking(uint32_t source, const FlowControl& sender) {
  const std::lock_guard<std::mutex> lock(mutex_);
  sources_[source].sender = &sender;
}

void Inbox::noteLeave(uint32_t source, uint64_t frames, const std::string& error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& leaving = sources_[source];
    leaving.lastFrame = frames;
    leaving.leaveError = error;
    if (!leaving.hasLeft()) return;
  }
  failAllOf(source, error);
}

void Inbox::noteFrame(uint32_t source) {
  std::string error;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& sending = sources_[source];
    ++sending.frames;
    if (!sending.hasLeft()) return;
    error = sending.leaveError;
  }
  failAllOf(source, error);
}

}  // namespace bagua::net

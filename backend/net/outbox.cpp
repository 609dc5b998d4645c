// SPDX-License-Identifier: Apache-2.0
#include "backend/net/outbox.h"

#include <cstring>
#include <iterator>

#include "backend/os/scratch_memory.h"

namespace bagua::net {
namespace {

// A payload that is no larger is copied at once, which costs less than to find the frame later.
constexpr uint32_t kSmallPayload = 16U << 10U;

// A copy that is no larger has memory of its own; larger ones share blocks for the largest payload.
constexpr uint32_t kOwnMemory = 64U << 10U;

// A peer may have this rank remember so many places ahead.
constexpr size_t kMostPlacesAhead = 65536;

}  // namespace

void OutgoingFrame::copyPayload() {
  if (!reader.exists()) return;
  const auto memory = header.payloadBytes <= kOwnMemory
                          ? std::shared_ptr<void>(std::make_shared_for_overwrite<uint8_t[]>(header.payloadBytes))
                          : ScratchMemory::ofProcess().take(kMostPayload);
  std::memcpy(memory.get(), payload(), header.payloadBytes);
  copy = std::shared_ptr<const uint8_t[]>(memory, static_cast<const uint8_t*>(memory.get()));
  reader = {};
}

void OutgoingFrame::copyPayload(const Outgoing& of, uint64_t end) {
  if (message.get() == &of && header.offset < end) copyPayload();
}

void Outbox::add(const std::shared_ptr<Outgoing>& message) {
  message->isTooLate = left_.contains(message->group);
  if (message->isTooLate) return;
  const auto place = placesAhead_.find({message->group, message->key});
  if (place != placesAhead_.end()) {
    message->allowed = std::max(message->allowed, place->second);
    message->placed = place->second;
    placesAhead_.erase(place);
  }
  message->number = added_++;
  queue_.push_back(message);
}

void Outbox::addControl(const Frame& header, std::vector<uint8_t> context) {
  controls_.push_back({.header = header, .context = std::move(context)});
}

void Outbox::sendAgain(std::vector<OutgoingFrame> frames) {
  again_.insert(again_.end(), std::move_iterator(frames.begin()), std::move_iterator(frames.end()));
}

std::optional<OutgoingFrame> Outbox::next(const ChooseCell& chooseCell) {
  for (auto* const first : {&again_, &controls_}) {
    if (first->empty()) continue;
    auto frame = std::move(first->front());
    first->pop_front();
    return frame;
  }
  const auto hasFrame = [](const auto& message) { return message->hasFrame(); };
  auto next = std::ranges::find_if(queue_, hasFrame);
  while (next != queue_.end() && !mayLeave(**next)) {
    const auto message = *next;
    letWait(next);
    if (!std::exchange(message->hasToldOfWaiting, true)) return cutOff(message, Frame::Kind::kWaiting, 0);
    next = std::ranges::find_if(queue_, hasFrame);
  }
  if (next == queue_.end()) return std::nullopt;
  const auto message = *next;
  const auto cell = chooseCell(message->payloadBytes(mostPayload_));
  if (!cell) return std::nullopt;
  return cutOff(message, message->isUnsolicited() ? Frame::Kind::kUnsolicited : Frame::Kind::kData, *cell);
}

bool Outbox::mayLeave(const Outgoing& message) {
  if (!message.isUnsolicited()) return true;
  return accounts_[message.group].unsolicited + chargeOf(message.payloadBytes(mostPayload_)) <= message.maxUnsolicited;
}

void Outbox::letWait(Queue::iterator message) {
  const auto waiting = *message;
  accounts_[waiting->group].waiting.emplace(waiting->number, waiting);
  queue_.erase(message);
}

OutgoingFrame Outbox::cutOff(const std::shared_ptr<Outgoing>& message, Frame::Kind kind, uint32_t cell) {
  OutgoingFrame frame{.header = {.kind = kind, .group = message->group, .key = message->key, .total = message->size},
                      .message = message};
  frame.header.offset = message->cut;
  frame.header.payloadBytes = kind == Frame::Kind::kWaiting ? 0 : message->payloadBytes(mostPayload_);
  frame.header.cell = cell;
  if (message->cut == 0) frame.context = message->context;
  frame.header.contextBytes = static_cast<uint16_t>(frame.context.size());
  auto& account = accounts_[message->group];
  ++account.frames;
  if (kind == Frame::Kind::kUnsolicited) account.unsolicited += chargeOf(frame.header.payloadBytes);
  message->hasBegun = true;
  message->writing.push_back(message->cut);
  message->cut += frame.header.payloadBytes;
  if (message->cut == message->size) std::erase(queue_, message);
  if (frame.header.payloadBytes > 0) frame.reader = MessageReader(message, frame.header.offset);
  if (frame.header.payloadBytes <= kSmallPayload && cell == 0) frame.copyPayload();
  return frame;
}

std::shared_ptr<Signal> Outbox::finish(OutgoingFrame& frame) {
  if (std::exchange(frame.hasGone, true) || !frame.message) return nullptr;
  auto& message = *frame.message;
  const auto written = std::ranges::find(message.writing, frame.header.offset);
  if (written != message.writing.end()) message.writing.erase(written);
  message.sent += frame.header.payloadBytes;
  return message.isComplete() || message.tellsProgress ? message.signal : nullptr;
}

void Outbox::cancel(const std::shared_ptr<Outgoing>& message) {
  std::erase(queue_, message);
  const auto account = accounts_.find(message->group);
  if (account != accounts_.end()) account->second.waiting.erase(message->number);
}

void Outbox::copyPayloads(const Outgoing& message, uint64_t end) {
  for (auto& frame : again_) frame.copyPayload(message, end);
}

void Outbox::grantPlace(uint64_t group, const MessageKey& key, uint64_t bytes) {
  const auto isMeant = [&](const auto& message) { return message->group == group && message->key == key; };
  if (const auto account = accounts_.find(group); account != accounts_.end()) {
    auto& waiting = account->second.waiting;
    const auto found = std::ranges::find_if(waiting, [&](const auto& one) { return isMeant(one.second); });
    if (found != waiting.end()) {
      queue_.push_front(std::move(found->second));
      waiting.erase(found);
    }
  }
  const auto message = std::ranges::find_if(queue_, isMeant);
  if (message == queue_.end()) {
    // This answers a message that has waited, and has gone meanwhile.
    if (bytes <= kEagerBytes) return;
    // A message that is complete needs no place any more; add() looks here for one that is to come.
    if (placesAhead_.size() >= kMostPlacesAhead) placesAhead_.erase(placesAhead_.begin());
    auto& ahead = placesAhead_[{group, key}];
    ahead = std::max(ahead, bytes);
    return;
  }
  (*message)->allowed = std::max((*message)->allowed, bytes);
  (*message)->placed = std::max((*message)->placed, bytes);
}

void Outbox::grantCredit(uint64_t group, uint64_t bytes) {
  const auto found = accounts_.find(group);
  if (found == accounts_.end()) return;
  auto& account = found->second;
  account.unsolicited -= std::min(account.unsolicited, bytes);
  // As many messages as find room go on, in their order.
  std::vector<std::shared_ptr<Outgoing>> going;
  uint64_t planned = account.unsolicited;
  for (auto next = account.waiting.begin(); next != account.waiting.end() && planned < kUnsolicitedBytes;) {
    const Outgoing& message = *next->second;
    if (planned + chargeOf(message.payloadBytes(mostPayload_)) > message.maxUnsolicited) {
      ++next;
      continue;
    }
    planned += chargeOf(kMostPayload) + message.sendable() - message.cut;
    going.push_back(std::move(next->second));
    next = account.waiting.erase(next);
  }
  queue_.insert(queue_.begin(), going.begin(), going.end());
}

uint64_t Outbox::leave(uint64_t group) {
  left_.insert(group);
  std::erase_if(queue_, [&](const auto& message) { return message->group == group; });
  std::erase_if(placesAhead_, [&](const auto& place) { return place.first.first == group; });
  const auto account = accounts_.find(group);
  if (account == accounts_.end()) return 0;
  const uint64_t frames = account->second.frames;
  accounts_.erase(account);
  return frames;
}

std::vector<std::shared_ptr<Signal>> Outbox::clear() {
  std::vector<std::shared_ptr<Signal>> signals;
  for (const auto& message : queue_) signals.push_back(message->signal);
  for (const auto& [group, account] : accounts_) {
    for (const auto& [number, message] : account.waiting) signals.push_back(message->signal);
  }
  for (const auto& frame : again_) {
    if (frame.message && !frame.hasGone) signals.push_back(frame.message->signal);
  }
  queue_.clear();
  again_.clear();
  accounts_.clear();
  controls_.clear();
  return signals;
}

uint64_t Outbox::backlog() const {
  uint64_t bytes = 0;
  for (const auto& message : queue_) bytes += message->sendable() - message->cut;
  for (const auto& frame : again_) bytes += frame.header.payloadBytes;
  return bytes;
}

}  // namespace bagua::net

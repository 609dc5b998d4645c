// SPDX-License-Identifier: Apache-2.0
// What a process of another host sends on a connection: frames that are true, contradict each other, overtake each
// other or are none, while receivers come, use what has come, and go. A receiver that is told its message is complete
// has every byte of it at its place, and no byte lies elsewhere.
#include <c10/util/Exception.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <vector>

#include "backend/net/frame_reader.h"
#include "backend/net/stream.h"
#include "tests/fuzz/fuzzed_bytes.h"

namespace bagua::net {
namespace {

using fuzz::FuzzedBytes;

// What a true frame has at each place of its message: never 0, which is what a receiver's memory begins with.
uint8_t truth(uint64_t offset) { return static_cast<uint8_t>(1 + offset % 251); }

// Who waits for a message, with memory of exactly the size that it says.
struct Receiver {
  std::shared_ptr<Incoming> message;
  std::vector<uint8_t> memory;
  bool accepts = false;
};

// What the peer hears back.
class Heard final : public FlowControl {
 public:
  void grantPlace(uint64_t /*group*/, const MessageKey& /*key*/, uint64_t bytes) override {
    TORCH_INTERNAL_ASSERT(bytes == kEagerBytes);
  }
  void grantCredit(uint64_t /*group*/, uint64_t bytes) override { credit_ += bytes; }
  void checkCharged(uint64_t charged) const { TORCH_INTERNAL_ASSERT(credit_ <= charged, "credit for what never came"); }

 private:
  uint64_t credit_ = 0;
};

class Connection final : public FrameSink {
 public:
  Connection() {
    std::array<int, 2> ends{};
    TORCH_INTERNAL_ASSERT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()) == 0);
    peer_ = UnsharedFile(ends[0]);
    own_ = Stream(UnsharedFile(ends[1]));
  }

  void send(const void* bytes, size_t count) {
    const auto* next = static_cast<const uint8_t*>(bytes);
    while (count > 0 && isAlive_) {
      const ssize_t size = ::send(peer_.number(), next, count, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (size > 0) {
        next += size;
        count -= static_cast<size_t>(size);
      }
      read();
    }
  }

  void read() {
    while (isAlive_) {
      const auto result = reader_.read(own_, *this);
      if (result == FrameReader::Result::kDry) return;
      isAlive_ = result == FrameReader::Result::kMore;
      const bool isBad = result == FrameReader::Result::kWrong || result == FrameReader::Result::kBroken;
      TORCH_INTERNAL_ASSERT(isBad == !reader_.error().empty());
    }
  }

  Inbox& inbox() { return *inbox_; }
  void checkCredit() const { heard_->checkCharged(charged_); }
  // In memory of exactly that size, as the peer sees it. Until then it has told of none.
  void fillCell(uint32_t index, std::vector<uint8_t> payload) { cells_[index] = std::move(payload); }

 private:
  Delivery begin(const Frame& frame, const std::vector<uint8_t>& context) override {
    if (frame.kind == Frame::Kind::kUnsolicited) charged_ += chargeOf(frame.payloadBytes);
    return {inbox_->begin(frame, context, heard_), inbox_};
  }
  bool control(const Frame& frame, const std::vector<uint8_t>& /*context*/) override {
    if (frame.kind == Frame::Kind::kLeave) inbox_->noteLeave(frame.key.source, frame.total, "left");
    return true;
  }
  bool acknowledge(uint64_t received) override { return received < 1000; }
  bool readCell(uint32_t index, const std::function<void(const uint8_t* payload)>& read) override {
    const auto cell = cells_.find(index);
    if (cell == cells_.end()) return false;
    read(cell->second.data());
    return true;
  }

  const std::shared_ptr<Heard> heard_ = std::make_shared<Heard>();
  uint64_t charged_ = 0;
  const std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>();
  UnsharedFile peer_;
  Stream own_;
  bool isAlive_ = true;
  std::map<uint32_t, std::vector<uint8_t>> cells_;
  FrameReader reader_;
};

MessageKey madeUpKey(FuzzedBytes& input) {
  return {.stream = input.take<uint8_t>() % 3U, .source = input.take<uint8_t>() % 2U, .index = 0};
}

Frame madeUpFrame(FuzzedBytes& input) {
  Frame frame;
  frame.key = madeUpKey(input);
  const int kind = input.take<uint8_t>() % 8;
  if (kind == 0) frame.kind = Frame::Kind::kPlace;
  if (kind == 1) frame.kind = Frame::Kind::kLeave;
  if (kind == 2) frame.kind = Frame::Kind::kMemory;
  if (kind == 3) frame.kind = Frame::Kind::kWaiting;
  if (kind == 4 || kind == 5) frame.kind = Frame::Kind::kUnsolicited;
  if (input.take<uint8_t>() % 16 == 0) frame.received = static_cast<uint64_t>(input.claim());
  frame.total = input.coin() ? 600 : static_cast<uint64_t>(input.claim());
  if (input.take<uint8_t>() % 16 == 0) frame.total = kEagerBytes + 600;
  if (frame.kind == Frame::Kind::kMemory) frame.contextBytes = input.take<uint8_t>();
  if (isControl(frame)) return frame;
  if (frame.kind == Frame::Kind::kWaiting && input.coin()) {
    frame.offset = uint64_t{100} * (input.take<uint8_t>() % 7U);
    return frame;
  }
  if (input.take<uint8_t>() % 8 == 0) frame.cell = input.take<uint8_t>() % (kPayloadCells + 2);
  // Often right behind each other, as those of a true message.
  frame.offset = input.coin() ? uint64_t{100} * (input.take<uint8_t>() % 7U) : static_cast<uint64_t>(input.claim());
  frame.payloadBytes = input.coin() ? 100 : input.take<uint32_t>() % (kMostPayload + 2);
  if (input.take<uint8_t>() % 16 == 0) frame.offset = kEagerBytes - input.take<uint8_t>();
  if (frame.offset == 0) frame.contextBytes = input.take<uint8_t>();
  return frame;
}

void sendTrueFrame(Connection& connection, FuzzedBytes& input) {
  const Frame frame = madeUpFrame(input);
  std::vector<uint8_t> context(frame.contextBytes);
  std::vector<uint8_t> payload;
  // Of a frame that is refused, no more is read.
  if (isValid(frame)) {
    for (uint64_t i = 0; i < frame.payloadBytes; ++i) payload.push_back(truth(frame.offset + i));
  }
  const bool isInCell = frame.cell > 0 && frame.cell <= kPayloadCells;
  if (isInCell && input.take<uint8_t>() % 8 != 0) connection.fillCell(frame.cell - 1, payload);
  connection.send(&frame, sizeof(frame));
  connection.send(context.data(), context.size());
  if (frame.cell == 0) connection.send(payload.data(), payload.size());
}

class Receivers {
 public:
  Receivers(Inbox& inbox, bool isTrue) : inbox_(inbox), isTrue_(isTrue) {}

  void change(FuzzedBytes& input) {
    const MessageKey key = madeUpKey(input);
    auto& receiver = receivers_[key];
    switch (input.take<uint8_t>() % 5) {
      case 0:
        return expect(receiver, key, input);
      case 1:
        if (receiver.message) receiver.message->use(std::min<uint64_t>(receiver.message->state().arrived, 1000));
        return;
      case 2:
        if (receiver.message) receiver.message->cancel();
        receivers_.erase(key);
        return inbox_.forget(key);
      case 3:
        return check(receiver);
      default:
        // Those that have a place keep it.
        return inbox_.retire(key.stream);
    }
  }

  void checkAll() {
    for (auto& [key, receiver] : receivers_) check(receiver);
  }

 private:
  void expect(Receiver& receiver, const MessageKey& key, FuzzedBytes& input) {
    if (receiver.message) return;
    // Seldom, as it takes long: one that goes round in its room.
    const bool goesRound = input.take<uint8_t>() % 64 == 0;
    const uint64_t size = goesRound ? kEagerBytes + 600 : input.coin() ? 600 : input.take<uint16_t>();
    const uint64_t room = std::min(size, kEagerBytes);
    receiver.memory.assign(room, 0);
    receiver.accepts = input.take<uint8_t>() % 4 != 0;
    receiver.message = inbox_.find(key);
    receiver.message->expectAt({.data = receiver.memory.data(),
                                .size = size,
                                .room = room,
                                .accepts = [accepts = receiver.accepts](const auto& /*context*/) { return accepts; },
                                .signal = std::make_shared<Signal>()});
  }

  void check(const Receiver& receiver) const {
    if (!receiver.message) return;
    const auto state = receiver.message->state();
    const bool isUntouched =
        std::all_of(receiver.memory.begin(), receiver.memory.end(), [](uint8_t byte) { return byte == 0; });
    if (!state.hasContext || !receiver.accepts) TORCH_INTERNAL_ASSERT(isUntouched, "written before it was accepted");
    if (!isTrue_ || !state.isComplete() || !receiver.accepts || *state.total != receiver.memory.size()) return;
    for (uint64_t i = 0; i < *state.total; ++i) TORCH_INTERNAL_ASSERT(receiver.memory[i] == truth(i), "byte ", i);
  }

  Inbox& inbox_;
  const bool isTrue_;
  std::map<MessageKey, Receiver> receivers_;
};

}  // namespace

void fuzzFrames(FuzzedBytes& input) {
  const bool isTrue = input.take<uint8_t>() % 4 != 0;
  // Kept until the connection has gone: it writes into their memory.
  auto connection = std::make_unique<Connection>();
  Receivers receivers(connection->inbox(), isTrue);
  while (input.left() > 0) {
    if (input.coin()) {
      receivers.change(input);
    } else if (isTrue || input.coin()) {
      sendTrueFrame(*connection, input);
    } else {
      const std::string bytes = input.text(255);
      connection->send(bytes.data(), bytes.size());
    }
  }
  connection->read();
  connection->checkCredit();
  receivers.checkAll();
}

}  // namespace bagua::net

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer calls it so
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  bagua::fuzz::FuzzedBytes input(data, size);
  bagua::net::fuzzFrames(input);
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
#include "backend/net/frame_reader.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/net/stream.h"

namespace bagua::net {
namespace {

// Has read so many frames from its socket already, and gives one with each call.
class StreamThatHasRead final : public EncryptedStream {
 public:
  explicit StreamThatHasRead(int frames) : left_(frames) {}

  Handshake handshake() override { return Handshake::kDone; }
  [[nodiscard]] const std::string& error() const override { return error_; }
  ssize_t receive(void* data, size_t size, bool /*mayAskSocket*/) override {
    const Frame frame{.kind = Frame::Kind::kCredit};
    if (left_ == 0 || size < sizeof(frame)) {
      errno = EAGAIN;
      return -1;
    }
    --left_;
    std::memcpy(data, &frame, sizeof(frame));
    return static_cast<ssize_t>(sizeof(frame));
  }
  [[nodiscard]] bool hasBuffered() const override { return left_ > 0; }
  ssize_t send(std::span<const iovec> /*parts*/) override { return 0; }
  [[nodiscard]] bool hasUnsent() const override { return false; }

 private:
  int left_;
  const std::string error_;
};

class CountingSink final : public FrameSink {
 public:
  Delivery begin(const Frame& /*frame*/, const std::vector<uint8_t>& /*context*/) override { return {}; }
  bool control(const Frame& /*frame*/, const std::vector<uint8_t>& /*context*/) override {
    ++controls;
    return true;
  }
  bool acknowledge(uint64_t /*received*/) override { return true; }
  bool readCell(uint32_t /*cell*/, const std::function<void(const uint8_t* payload)>& /*read*/) override {
    return false;
  }

  int controls = 0;
};

// The loop calls again only where the socket has more: what was left would wait for something else to come.
TEST(FrameReader, LeavesNothingThatAStreamHasReadAlready) {
  // More than a connection takes before others have their turn.
  constexpr int kFrames = 100;
  Stream stream(UnsharedFile{}, std::make_unique<StreamThatHasRead>(kFrames));
  CountingSink sink;
  FrameReader reader;
  EXPECT_EQ(reader.read(stream, sink), FrameReader::Result::kMore);
  EXPECT_EQ(sink.controls, kFrames);
  EXPECT_FALSE(stream.hasBuffered());
}

}  // namespace
}  // namespace bagua::net

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "backend/net/event_loop.h"
#include "backend/net/frame.h"
#include "backend/net/frame_reader.h"
#include "backend/net/outbox.h"
#include "backend/net/payload_memory.h"
#include "backend/net/stream.h"

namespace bagua::net {

// One socket between two processes: it brings frames in, and takes one frame at a time on its way out. It has no life
// of its own beyond that: the link above it decides what leaves and what a loss means. The link's mutex guards
// everything but write(), which one thread at a time calls without it, while isBusy is set.
class Connection final : public EventLoop::Handler, public std::enable_shared_from_this<Connection> {
 public:
  // The link above. It is called on the loop's thread.
  class Owner : public FrameSink {
   public:
    // The socket has an event before the connection is one: the answer of the other side, or why there is none.
    virtual void onConnecting(const std::shared_ptr<Connection>& connection) = 0;
    virtual void onWritable(Connection& connection) = 0;
    virtual void onRead(const std::shared_ptr<Connection>& connection, FrameReader::Result result) = 0;
  };

  // `isOpening`: this process has opened it, and nothing but `hello` may be written before the other side answers.
  Connection(std::weak_ptr<Owner> owner, Stream stream);
  Connection(std::weak_ptr<Owner> owner, Stream stream, const Hello& hello);

  void onReadable() override;
  void onWritable() override;

  [[nodiscard]] int number() const { return stream_.number(); }
  [[nodiscard]] const FileDescriptor& socket() const { return stream_.socket(); }
  [[nodiscard]] Stream& stream() { return stream_; }
  [[nodiscard]] const FrameReader& reader() const { return reader_; }

  // A thread may write now.
  [[nodiscard]] bool isFree() const { return !isBlocked && !isBusy && !isClosed; }
  [[nodiscard]] bool hasToWrite() const {
    return headWritten_ < head_.size() || payloadLeft_ > 0 || stream_.hasUnsent();
  }
  // Takes a frame. Where its payload goes through a cell, that is one of `memory`.
  void give(OutgoingFrame frame, std::shared_ptr<PayloadMemory> memory);
  // Writes what the kernel takes. Returns the error, or 0.
  int write();
  // Returns the frame that has been written completely, once.
  std::optional<OutgoingFrame> takeWritten();
  // Returns whether the frame under way is one of this message.
  [[nodiscard]] bool carries(const Outgoing& message) const { return frame_ && frame_->message.get() == &message; }
  [[nodiscard]] std::shared_ptr<Signal> signal() const {
    return frame_ && frame_->message ? frame_->message->signal : nullptr;
  }
  // The message's memory is not read from here on: what has to follow of the frame is copied.
  void copyPayload();

  // The other side has not accepted the connection yet; it has answered, and the handshake has begun.
  bool isConnecting = false;
  bool isAnswered = false;
  // The kernel takes no more; the loop tells when it does.
  bool isBlocked = false;
  // A thread is writing.
  bool isBusy = false;
  bool isClosed = false;
  // The peer sends nothing more.
  bool hasEnded = false;
  // So many looks in a row have found data unacknowledged and no sign of the peer.
  int silentLooks = 0;

 private:
  const std::weak_ptr<Owner> owner_;
  Stream stream_;
  FrameReader reader_;
  std::optional<OutgoingFrame> frame_;
  // The bytes that are being written: the header with its context, and the payload.
  std::vector<uint8_t> head_;
  size_t headWritten_ = 0;
  const uint8_t* payload_ = nullptr;
  uint64_t payloadLeft_ = 0;
  // If it is not 0, the payload goes into this cell of `memory_`, counted from 1, and not on the socket.
  uint32_t cell_ = 0;
  std::shared_ptr<PayloadMemory> memory_;
  // Payload of a message that was cancelled.
  std::vector<uint8_t> copied_;
};

}  // namespace bagua::net

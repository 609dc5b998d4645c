// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
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
#include "backend/net/sent_frames.h"
#include "backend/net/stream.h"

namespace bagua::net {

class Link;

// One socket between two processes: it brings frames in, and takes one frame at a time on its way out. It has no life
// of its own beyond that: the link above it decides what leaves and what a loss means. The link's mutex guards
// everything but write(), which one thread at a time calls without it, while isBusy is set.
class Connection final : public EventLoop::Handler, public std::enable_shared_from_this<Connection> {
 public:
  // `number` is Hello::connection. Nothing leaves before `greeting`; where this process has opened the connection, that
  // waits for the other side to accept it.
  Connection(std::weak_ptr<Link> link, Stream stream, uint64_t number, bool isOwn, std::vector<uint8_t> greeting);

  void onReadable() override;
  void onWritable() override;

  [[nodiscard]] uint64_t number() const { return number_; }
  // This process has opened it.
  [[nodiscard]] bool isOwn() const { return isOwn_; }
  [[nodiscard]] const UnsharedFile& socket() const { return stream_.socket(); }
  [[nodiscard]] Stream& stream() { return stream_; }
  [[nodiscard]] const FrameReader& reader() const { return reader_; }
  [[nodiscard]] SentFrames& sent() { return sent_; }
  // Frames that are counted have gone one way or the other.
  [[nodiscard]] bool hasCarried() const { return reader_.frames() > 0 || sent_.hasAny(); }

  // A thread may write now.
  [[nodiscard]] bool isFree() const { return !isBlocked && !isBusy && !isClosed; }
  [[nodiscard]] bool hasToWrite() const {
    return headWritten_ < head_.size() || payloadLeft_ > 0 || stream_.hasUnsent();
  }
  // Takes a frame, which tells the other side what has come. Where its payload goes through a cell, that is one of
  // `memory`.
  void give(OutgoingFrame frame, std::shared_ptr<PayloadMemory> memory);
  // Writes what the kernel takes. Returns the error, or 0.
  int write();
  // Returns the frame that has been written completely, once.
  std::optional<OutgoingFrame> takeWritten();
  // Returns the frame that will never be.
  std::optional<OutgoingFrame> takeUnwritten();
  [[nodiscard]] std::shared_ptr<Signal> signal() const {
    return frame_ && frame_->message ? frame_->message->signal : nullptr;
  }
  // The frame under way stays in this message, before `end`.
  [[nodiscard]] bool carries(const Outgoing& message, uint64_t end) const {
    return frame_ && frame_->message.get() == &message && frame_->reader.exists() && frame_->header.offset < end;
  }
  // Copies the payload of the frame under way, and of those that are kept, if it stays in the message before `end`. No
  // thread is writing.
  void copyPayloads(const Outgoing& message, uint64_t end);

  // Frames have come that the other side has not been told of; these are many. Any thread may ask.
  [[nodiscard]] bool owesWord() const { return reader_.frames() != toldFrames_; }
  [[nodiscard]] bool owesMuch() const { return reader_.weight() - toldWeight_ >= kMostUntold; }

  // The other side has not accepted the connection yet; it has answered, and the handshake has begun.
  bool isConnecting = false;
  std::atomic<bool> isAnswered = false;
  // The other side is the peer, and takes the connection for one of this link.
  bool isWelcome = false;
  // It has not said so for long, and is given up where it does on another connection.
  bool isOverdue = false;
  // Opened beside one that is overdue: it takes no frames before it is welcome.
  bool isSpare = false;
  // It was opened beside one that works, and nobody misses it.
  bool isAdditional = false;
  // The kernel takes no more; the loop tells when it does.
  bool isBlocked = false;
  bool isBusy = false;
  // Nothing is read or written any more. Set on the loop's thread, or with the end of the link.
  std::atomic<bool> isClosed = false;
  // The kernel takes no more while it has so many bytes that it has not sent yet.
  int mostUnsent = kMostUnsent;
  // The other side is to be told at once what has come; it is to tell at once, too.
  bool isToTell = false;
  bool isToAsk = false;
  // The last word of the other side: so many frames have come there.
  std::optional<uint64_t> lastWord;
  // So many looks in a row have found data unacknowledged and no sign of the peer.
  int silentLooks = 0;

 private:
  // The other side keeps about as much (see FrameReader::weight()) where nothing goes back to it. Little of it is then
  // copied at the end of a message, and a frame without payload for each megabyte costs nothing beside it.
  static constexpr uint64_t kMostUntold = 1U << 20U;

  const std::weak_ptr<Link> link_;
  Stream stream_;
  const uint64_t number_;
  const bool isOwn_;
  FrameReader reader_;
  SentFrames sent_;
  std::atomic<uint64_t> toldFrames_ = 0;
  std::atomic<uint64_t> toldWeight_ = 0;
  std::optional<OutgoingFrame> frame_;
  // The bytes that are being written: the header with its context, and the payload.
  std::vector<uint8_t> head_;
  size_t headWritten_ = 0;
  const uint8_t* payload_ = nullptr;
  uint64_t payloadLeft_ = 0;
  // If it is not 0, the payload goes into this cell of `memory_`, counted from 1, and not on the socket.
  uint32_t cell_ = 0;
  std::shared_ptr<PayloadMemory> memory_;
};

}  // namespace bagua::net

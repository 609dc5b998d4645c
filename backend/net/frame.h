// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

// These are the bytes of a connection between two processes: whoever opens it sends one Hello, then both send frames,
// of which the first of the other side is the answer to the Hello. Integers are little-endian. A receiver believes
// nothing before isValid() has checked it. A change of a byte, or of its meaning, raises kWireFormat
// (backend/rendezvous/wire_format.h).
namespace bagua::net {

// The name of a process, which it draws at random when it starts to communicate.
using ProcessId = std::array<uint64_t, 2>;

// A link outlives its connections. Every frame that a link sends is received exactly once, in whichever order, over as
// many connections as that takes:
//
// 1. On one connection frames arrive in the order in which they were written, or the connection ends. So both sides
//    count them, and none has a number. Every frame tells how many the other direction has brought so far; where none
//    is to be sent, kReceived tells it.
// 2. A frame is kept where it was sent until the other side has told that it has come. Its payload stays in the memory
//    of the message. When the message's owner wants that back, what has not been acknowledged is copied.
// 3. A side that finds a connection broken reads nothing more of it, and tells how many frames it has brought: kEnded.
//    That is its last word about it, and it says so whether the other side has found the same or not. It says it over a
//    connection that has been opened since, as far as one can be: so nothing is written to what a process that has
//    ended has left in its kernel, which would throw that away.
// 4. A side that hears the last word of the other about a connection ends it too, and says its own last word if it has
//    not. Then it sends again, over any connection, what the other has not received. So a frame is never on its way
//    twice: nobody has to look for duplicates, and what an old connection still brings cannot be written over what has
//    been made of it since.
// 5. kEnded is a frame like others, kept and sent again. A connection of which a side has never heard has brought
//    nothing; if it comes later, it is not taken.
// 6. Whoever has opened a connection that breaks opens another one at once; the other side does so where that takes
//    long. Both may do it at the same time: the link has two then.
// 7. A link ends when its process has ended (where it listened, connections are refused, or another process answers),
//    when the peer has lost its end of it (the answer to a Hello names no link), or when no connection has been
//    possible for the time of the link's patience. A refusal says nothing where a firewall may be what refuses: a peer
//    that comes by itself, and has not been reached, is probed some seconds later.
// 8. A Hello may stay unanswered though a connection was possible: a kernel takes connections also for a process that
//    is stopped, or has not joined yet, and somebody who never answers may take them. So after half of its patience a
//    link opens another connection beside, and after twice that time again, and so on. These are given no frames
//    before they are answered. If the first is answered after all, they end. If one of them is answered and the first
//    is not, that ends, with 3. and 4.: its Hello is refused by 5. if it arrives yet.
//
// Whoever opens a connection says this first. The answer is a kWelcome with a Hello of the other side.
struct Hello {
  static constexpr uint64_t kMagic = 0x4F4C'4C45'4857'4742;  // "BGWHELLO"
  // No link has this number: theirs are odd.
  static constexpr uint64_t kNoLink = 2;
  uint64_t magic = kMagic;
  ProcessId from = {};
  ProcessId to = {};
  // The link that the connection belongs to. A process that has lost a link makes another one. In an answer, 0: it has
  // none that this would be a connection of.
  uint64_t link = 0;
  // The link of the other process that this one has heard of; 0: none yet; kNoLink: see Probe.
  uint64_t peerLink = 0;
  // The connection among all of these two links: even numbers are those that the process with the lower name opens.
  uint64_t connection = 0;
};
static_assert(sizeof(Hello) == 64 && std::is_trivially_copyable_v<Hello>);

// A message of a group is identified by this key.
struct MessageKey {
  // The operation's sequence number, or the number of a channel of messages between two ranks.
  uint64_t stream = 0;
  // The sender's rank in the group.
  uint32_t source = 0;
  // The position among the messages of the stream from this sender to this receiver.
  uint32_t index = 0;

  friend auto operator<=>(const MessageKey&, const MessageKey&) = default;
};

struct Frame {
  static constexpr uint32_t kMagic = 0x4657'4742;  // "BGWF"
  enum class Kind : uint16_t {
    // A part of a message for which the receiver has announced a place; or an empty message.
    kData = 1,
    // The receiver has a place for the first `total` bytes of the message.
    kPlace = 2,
    // The sender, key.source, has left the group, to which it has sent `total` data frames on this link.
    kLeave = 3,
    // The context is the name of the sender's PayloadMemory.
    kMemory = 4,
    // Cells of the receiver's PayloadMemory are free again.
    kCells = 5,
    // A part of a message for which the sender knows of no place: see kUnsolicitedBytes.
    kUnsolicited = 6,
    // A part without payload: the sender waits for a place, or for credit, before it sends more of the message.
    kWaiting = 7,
    // The receiver has released `total` of the bytes that have come unsolicited for the group.
    kCredit = 8,
    // The context is the Hello that answers that of the other side. Not counted: it belongs to one connection.
    kWelcome = 9,
    // Nothing but `received`; with a `total` that is not 0, the other side is asked for the same. Not counted.
    kReceived = 10,
    // The connection key.stream has ended, and has brought `total` frames.
    kEnded = 11,
    // The answer to whoever sends for a group that the process of the other side has left, or will not join, without
    // having spoken with it: it takes nothing for the group, and sends nothing.
    kAbsent = 12,
    // The sender, key.source, waits for what may come for the group, and asks to be told when the other side leaves it.
    kAskForLeave = 13,  // isValid() takes it for the last
  };
  uint32_t magic = kMagic;
  Kind kind = Kind::kData;
  // The bytes of context between this header and the payload. Only frames with offset 0 of a message have some.
  uint16_t contextBytes = 0;
  uint64_t group = 0;
  MessageKey key = {};
  // The bytes of the whole message, and where the payload of this frame lies in it.
  uint64_t total = 0;
  uint64_t offset = 0;
  uint32_t payloadBytes = 0;
  // If it is not 0, the payload is not on the connection, but in cell - 1 of the sender's PayloadMemory.
  uint32_t cell = 0;
  // The counted frames that this connection has brought to the sender of this one.
  uint64_t received = 0;
};
static_assert(sizeof(Frame) == 64 && std::is_trivially_copyable_v<Frame>);

// The payload of one frame is so small that several connections share a message evenly, and that urgent frames wait for
// little.
inline constexpr uint32_t kMostPayload = 256U << 10U;
inline constexpr uint16_t kMostContext = 512;
// A PayloadMemory has so many cells, each with room for kMostPayload.
inline constexpr uint32_t kPayloadCells = 8;
// A sender sends so much of a message before its receiver has announced a place for it.
inline constexpr uint64_t kEagerBytes = 4U << 20U;
// A sender sends so much of all messages of a group to one peer, until the receiver gives credit:
//
// 1. The sender charges every unsolicited frame to the group's account. Nothing else happens as long as the account has
//    room, so that a message costs one delay.
// 2. The receiver releases a frame when its message has a place: at once where a receive was posted before, else when
//    one is posted. What nobody wants is released at once. It gives credit for what it has released, kCreditBytes at a
//    time.
// 3. Where the account has no room, the sender sends a frame that waits, once per message, with the context and
//    without payload. So a receiver that takes from any rank, or compares programs, hears of the message all the same.
// 4. The receiver announces a place to a message that waits as soon as it has one. What has a place leaves uncharged:
//    messages arrive in whichever order their receives are posted, whatever lies unreleased before them.
// 5. Credit lets the messages that wait go on in the order in which they were sent, with a place or without.
//
// So nobody waits for anything but the receive of that very message, and a receive waits for nothing.
inline constexpr uint64_t kUnsolicitedBytes = 32U << 20U;
inline constexpr uint64_t kCreditBytes = kUnsolicitedBytes / 8;
// A frame is charged this much beyond its payload: about what a receiver needs to remember a message.
inline constexpr uint64_t kFrameCharge = 512;
inline constexpr uint64_t kLargestMessage = uint64_t{1} << 46U;

template <class Object>
std::vector<uint8_t> bytesOf(const Object& object) {
  const auto* const begin = reinterpret_cast<const uint8_t*>(&object);
  return {begin, begin + sizeof(object)};
}

// Nothing where there are not as many bytes as an object has.
template <class Object>
std::optional<Object> fromBytes(const std::vector<uint8_t>& bytes) {
  if (bytes.size() != sizeof(Object)) return std::nullopt;
  Object object;
  std::memcpy(&object, bytes.data(), sizeof(object));
  return object;
}

inline uint64_t chargeOf(uint32_t payloadBytes) { return payloadBytes + kFrameCharge; }

// Returns whether a frame is about messages and carries none.
inline bool isControl(const Frame& frame) {
  return frame.kind != Frame::Kind::kData && frame.kind != Frame::Kind::kUnsolicited &&
         frame.kind != Frame::Kind::kWaiting;
}

// Returns whether a frame is kept until it is acknowledged.
inline bool isCounted(const Frame& frame) {
  return frame.kind != Frame::Kind::kWelcome && frame.kind != Frame::Kind::kReceived;
}

// Returns whether a header contradicts neither itself nor the limits above. Nothing of it is used before.
inline bool isValid(const Frame& frame) {
  if (frame.magic != Frame::kMagic || frame.payloadBytes > kMostPayload || frame.contextBytes > kMostContext)
    return false;
  if (frame.kind < Frame::Kind::kData || frame.kind > Frame::Kind::kAskForLeave) return false;
  if (isControl(frame)) {
    if (frame.payloadBytes > 0 || frame.cell > 0) return false;
    if (frame.kind == Frame::Kind::kWelcome) return frame.contextBytes == sizeof(Hello);
    return (frame.contextBytes > 0) == (frame.kind == Frame::Kind::kMemory);
  }
  if (frame.cell > kPayloadCells || (frame.cell > 0 && frame.payloadBytes == 0)) return false;
  if (frame.kind != Frame::Kind::kData && (frame.payloadBytes > 0) != (frame.kind == Frame::Kind::kUnsolicited))
    return false;
  return frame.total <= kLargestMessage && frame.offset <= frame.total &&
         frame.payloadBytes <= frame.total - frame.offset && (frame.offset == 0 || frame.contextBytes == 0);
}

}  // namespace bagua::net

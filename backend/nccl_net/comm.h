// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/nccl_net/nccl_net_api.h"
#include "backend/net/group.h"
#include "backend/net/transport.h"

namespace bagua::nccl_net {

// Receives that NCCL may group in one request.
inline constexpr int kMostGrouped = 8;

// A send comm or a receive comm of NCCL's: messages in one direction, from one process to another. It is a group of two
// of the transport, so that all that go between two processes share one link. NCCL asks it over and over whether
// something is complete; only what the transport has notified of is looked at. Any thread may call.
class Comm {
 public:
  enum class End : int { kReceiver = 0, kSender = 1 };
  class Request;

  // `id` is that of the pair. The sender says at once who it is.
  Comm(std::shared_ptr<net::Transport> transport, uint64_t id, End end, const net::ProcessAddress& peer);
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  // Whether the first bytes have gone to the receiver, which has then proved what it has to. `result` is an error where
  // they never will.
  bool isOpen(Result& result);

  struct Range {
    const uint8_t* data = nullptr;
    size_t size = 0;
  };
  // Null where too many requests are under way.
  Result send(Range data, int tag, Request*& request);
  struct Part {
    uint8_t* data = nullptr;
    size_t size = 0;
    int tag = 0;
  };
  Result receive(const std::vector<Part>& parts, Request*& request);
  // `sizes`, if it is not null, has as many numbers as the request has parts. A request that is complete is no more.
  Result test(Request& request, bool& isComplete, int* sizes);
  // Nothing in the range is read or written any more: NCCL frees memory before it closes a comm.
  void forget(const Range& range);

  // The first message of a pair, without bytes: its context is the sender's address.
  static net::MessageKey greetingKey();

 private:
  // These are called under the mutex.
  [[nodiscard]] std::pair<uint64_t, uint32_t> nextKey(int tag);
  Request* takeRequest();
  void giveBack(Request& request);
  // Notes the first error, and tells NCCL's log of it.
  Result fail(Result result, const std::string& why);
  // Whether the peer has closed its end, and has had the time to take what it still wanted.
  bool isPeerGone();
  [[nodiscard]] int other() const { return end_ == End::kSender ? 0 : 1; }

  const std::shared_ptr<net::Transport> transport_;
  const End end_;
  const net::SocketAddress peer_;
  const std::shared_ptr<net::Signal> signal_ = std::make_shared<net::Signal>();
  std::shared_ptr<net::Group> group_;
  std::unique_ptr<net::Group::Sending> greeting_;
  // Never comes: it fails when the peer leaves or is lost, so that a sender is notified as well.
  std::unique_ptr<net::Group::Receiving> farewell_;

  std::mutex mutex_;
  std::vector<std::unique_ptr<Request>> requests_;
  std::vector<Request*> free_;
  // How many messages of each tag there have been.
  std::map<int, uint64_t> counts_;
  std::optional<std::chrono::steady_clock::time_point> leftAt_;
  Result failure_ = Result::kSuccess;
};

// What NCCL waits for: a message, or several that are received together.
class Comm::Request {
 public:
  explicit Request(Comm& comm) : comm_(comm) {}
  [[nodiscard]] Comm& comm() const { return comm_; }

 private:
  friend class Comm;
  // One of `sending` and `receiving`; neither where the memory was given up.
  struct Message {
    Range range;
    std::unique_ptr<net::Group::Sending> sending = nullptr;
    std::unique_ptr<net::Group::Receiving> receiving = nullptr;
    bool isComplete = false;
    uint64_t size = 0;
  };

  Comm& comm_;
  bool isUsed_ = false;
  // The count of the signal when the messages were last looked at.
  std::optional<uint64_t> seen_;
  std::vector<Message> messages_;
};

}  // namespace bagua::nccl_net

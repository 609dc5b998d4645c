// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "backend/nccl_net/connection.h"
#include "backend/nccl_net/nccl_net_api.h"
#include "backend/net/transport.h"

namespace bagua::nccl_net {

// NCCL brings this from the process that listens to the one that connects, over its bootstrap.
struct Handle {
  uint64_t magic = 0;
  uint64_t pair = 0;
  // A net::ProcessAddress, as text that ends with a null.
  char address[112] = {};
};
static_assert(sizeof(Handle) == kHandleBytes);

// Waits for the one sender that gets its handle.
class Listener {
 public:
  explicit Listener(std::shared_ptr<net::Transport> transport);
  // A sender that has come and was not let in hears of it.
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  [[nodiscard]] Handle handle() const;
  // Null as long as the sender has not come, and once it has been returned. Throws DistNetworkError where it never
  // will.
  std::unique_ptr<Connection> accept();

 private:
  const std::shared_ptr<net::Transport> transport_;
  const uint64_t pair_;
  const net::Membership membership_;
  const std::shared_ptr<net::Inbox> inbox_;
  bool isTaken_ = false;
};

// The part of a process in the network that NCCL sees. Its transport is the one that CPU tensors take, if any do. Any
// thread may call.
class Network {
 public:
  // Never destroyed: threads of NCCL's may still use it at the end of the process.
  static Network& ofProcess();

  // Throws where there is none: see net::processTransport().
  std::shared_ptr<net::Transport> transport();
  // Null as long as the receiver has not let us in: to be called again. Throws ValueError for a handle that is not
  // ours. What `context` has begun ends with forget().
  std::unique_ptr<Connection> connect(const void* context, const Handle& handle, Result& result);
  void forget(const void* context);

  struct Device {
    std::string interface = "bagua";
    // In Mbit/s: as NCCL takes it where an interface does not tell.
    int speed = 10'000;
  };
  // The interface that the transport listens at.
  static Device device();

 private:
  struct Dialing {
    const void* context;
    std::unique_ptr<Connection> connection;
  };
  // That which reaches `peer`: a process cannot have a link to itself, but to a second transport of its own.
  std::shared_ptr<net::Transport> transportTo(const net::ProcessId& peer);

  std::mutex mutex_;
  std::map<uint64_t, Dialing> dialing_;
  std::shared_ptr<net::Transport> second_;
};

}  // namespace bagua::nccl_net

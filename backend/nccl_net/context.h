// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "backend/nccl_net/comm.h"
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

class Context;

// Waits for the one sender that gets its handle. A sender that comes after its end, or was not let in, hears of that.
class ListenComm {
 public:
  ListenComm(Context& context, std::shared_ptr<net::Transport> transport);
  ListenComm(const ListenComm&) = delete;
  ListenComm& operator=(const ListenComm&) = delete;
  [[nodiscard]] Context& context() const { return context_; }
  [[nodiscard]] Handle handle() const;
  // Null as long as the sender has not come, and once it has been returned. Throws DistNetworkError where it never
  // will.
  std::unique_ptr<Comm> accept();

 private:
  Context& context_;
  const std::shared_ptr<net::Transport> transport_;
  const uint64_t pair_;
  const net::Membership membership_;
  const std::shared_ptr<net::Inbox> inbox_;
  bool isTaken_ = false;
};

// What NCCL makes a communicator's comms with. It closes all that it was given, but gives up what is not there yet when
// a communicator is aborted: that ends with this. Any thread may call.
class Context {
 public:
  // Throws where there is no transport: see net::processTransport().
  ListenComm& listen();
  void close(const ListenComm& listening);
  // Null as long as the receiver has not let us in: to be called again. Throws ValueError for a handle that is not
  // ours.
  std::unique_ptr<Comm> connect(const Handle& handle, Result& result);
  // Ends all that has been begun.
  void clear();

 private:
  std::mutex mutex_;
  std::map<const ListenComm*, std::unique_ptr<ListenComm>> listening_;
  // By the pair of the handle.
  std::map<uint64_t, std::unique_ptr<Comm>> dialing_;
};

}  // namespace bagua::nccl_net

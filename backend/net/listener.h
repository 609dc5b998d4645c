// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "backend/config.h"
#include "backend/net/event_loop.h"
#include "backend/net/stream.h"

namespace bagua::net {

class Transport;

// Listens at an address, at the first of these ports that is free: each process of a host needs one of its own. Throws
// DistNetworkError.
UnsharedFile listenAt(const std::string& address, config::PortRange ports = {});

// Accepts connections, and hands each to the transport once it has said whose it is. On the loop's thread only.
class Listener final : public EventLoop::Handler, public std::enable_shared_from_this<Listener> {
 public:
  Listener(std::weak_ptr<Transport> transport, std::shared_ptr<EventLoop> loop, int socket);

  void onReadable() override;
  void onWritable() override {}

 private:
  class Guest;

  void letIn(Transport& transport, UnsharedFile accepted);
  // Guests that say nothing take up the files of others: the oldest has had the best chance.
  void sendOldestAway();
  // A connection that there is no file for waits in the kernel; without a pause the socket would be readable for ever.
  void pause(int error);
  void goOnLater();
  void noteRefusal(const Stream& stream);
  // Logs it, but not more often than once a minute: a stranger could fill a disk.
  void warn(std::optional<std::chrono::steady_clock::time_point>& last, const std::string& text);

  const std::weak_ptr<Transport> transport_;
  const std::shared_ptr<EventLoop> loop_;
  const int socket_;
  const size_t mostGuests_;
  std::deque<std::shared_ptr<Guest>> guests_;
  uint64_t refused_ = 0;
  std::optional<std::chrono::steady_clock::time_point> refusalTold_;
  std::optional<std::chrono::steady_clock::time_point> pauseTold_;
};

}  // namespace bagua::net

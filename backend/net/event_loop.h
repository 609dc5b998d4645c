// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backend/net/socket.h"

namespace bagua::net {

// One thread ("bagua_wire", started with the first socket) that waits for all sockets of a process.
class EventLoop {
 public:
  // Called on the loop's thread.
  class Handler {
   public:
    Handler() = default;
    virtual ~Handler() = default;
    Handler(const Handler&) = delete;
    Handler& operator=(const Handler&) = delete;
    virtual void onReadable() = 0;
    virtual void onWritable() = 0;
  };

  EventLoop();
  ~EventLoop() { stop(); }
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // From any thread. The handler lives until remove().
  void add(int socket, const std::shared_ptr<Handler>& handler, bool wantsWritable);
  void remove(int socket);
  // Readable is always asked for.
  void askForWritable(int socket, bool wants);
  // Ends the thread and drops the handlers. From the thread itself it only asks for the end.
  void stop();

 private:
  // Shared with the thread, which may be the last to hold what owns the loop.
  struct State {
    FileDescriptor epoll;
    FileDescriptor wakeUp;
    std::mutex mutex;
    std::map<int, std::shared_ptr<Handler>> handlers;
    bool isStopping = false;
  };
  static void run(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace bagua::net

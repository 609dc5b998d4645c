// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/epoll.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "backend/net/socket.h"

namespace bagua::net {

// One thread ("bagua_wire", started with the first socket or call) waits for all sockets of a process.
class EventLoop {
 public:
  // The loop calls these on its thread.
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

  // Any thread may call these. The handler lives until remove().
  void add(int socket, const std::shared_ptr<Handler>& handler, bool wantsWritable);
  void remove(int socket);
  // Asks to be told when the socket can be written to; that it can be read from is always told.
  void askForWritable(int socket, bool wants);
  // Calls once on the loop's thread, not before `delay` has passed. Never called if the loop is stopped before.
  void callLater(std::chrono::milliseconds delay, std::function<void()> call);
  // Ends the thread and drops handlers and calls. From the thread itself it only asks for the end.
  void stop();
  // Has the thread end, and waits a second at most until it has; handlers stay. For the end of the process.
  void halt();

 private:
  using Clock = std::chrono::steady_clock;
  // Each time that a descriptor is added it has another number: what is closed leaves its descriptor, and perhaps an
  // event that the loop has just heard of, to what is opened next.
  struct Added {
    uint32_t number = 0;
    std::shared_ptr<Handler> handler = nullptr;
  };
  // Shared with the thread, which may be the last to hold what owns the loop.
  struct State {
    UnsharedFile epoll;
    UnsharedFile wakeUp;
    std::mutex mutex;
    std::map<int, Added> handlers;
    uint32_t added = 0;
    std::multimap<Clock::time_point, std::function<void()>> later;
    bool isStopping = false;
    bool hasEnded = false;
    std::condition_variable ended;
  };
  static void run(const std::shared_ptr<State>& state);
  static void handle(State& state, const epoll_event& event);
  // Makes the calls that are due. Returns for how many milliseconds epoll_wait() may wait for others; -1: for ever.
  static int callDue(State& state);
  // Under the mutex. Not from the thread itself.
  void start();
  void wake();

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace bagua::net

// SPDX-License-Identifier: Apache-2.0
#include "backend/net/event_loop.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/thread_name.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace bagua::net {
namespace {

// `number` tells the descriptor from others that had, or will have, its value.
epoll_event eventsOf(int socket, uint32_t number, bool wantsWritable) {
  epoll_event event{};
  event.events = wantsWritable ? uint32_t{EPOLLIN} | uint32_t{EPOLLOUT} : uint32_t{EPOLLIN};
  event.data.u64 = uint64_t{number} << 32U | static_cast<uint32_t>(socket);
  return event;
}

uint32_t numberOf(const epoll_event& event) { return static_cast<uint32_t>(event.data.u64 >> 32U); }
int socketOf(const epoll_event& event) { return static_cast<int>(event.data.u64 & 0xFFFF'FFFFU); }

}  // namespace

EventLoop::EventLoop() : state_(std::make_shared<State>()) {
  state_->epoll = UnsharedFile(epoll_create1(EPOLL_CLOEXEC));
  state_->wakeUp = UnsharedFile(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  TORCH_CHECK_WITH(DistNetworkError, state_->epoll.isOpen() && state_->wakeUp.isOpen(),
                   "bagua: cannot wait for sockets: ", std::strerror(errno));
  epoll_event event = eventsOf(state_->wakeUp.number(), 0, false);
  epoll_ctl(state_->epoll.number(), EPOLL_CTL_ADD, state_->wakeUp.number(), &event);
}

void EventLoop::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(state_->wakeUp.number(), &one, sizeof(one));
}

void EventLoop::start() {
  if (!thread_.joinable() && !state_->isStopping) thread_ = std::thread([state = state_] { run(state); });
}

void EventLoop::stop() {
  // Destroyed without the mutex.
  std::map<int, Added> dropped;
  std::multimap<Clock::time_point, std::function<void()>> calls;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->isStopping = true;
    dropped.swap(state_->handlers);
    calls.swap(state_->later);
  }
  wake();
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void EventLoop::halt() {
  std::unique_lock lock(state_->mutex);
  state_->isStopping = true;
  if (!thread_.joinable()) return;
  wake();
  // Libraries free what they keep for a thread at its very end, which only join() waits for.
  if (state_->ended.wait_for(lock, std::chrono::seconds(1), [&] { return state_->hasEnded; })) thread_.join();
}

void EventLoop::callLater(std::chrono::milliseconds delay, std::function<void()> call) {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->isStopping) return;
    state_->later.emplace(Clock::now() + delay, std::move(call));
    // The thread looks at this before it sleeps again.
    if (thread_.get_id() == std::this_thread::get_id()) return;
    start();
  }
  wake();
}

void EventLoop::add(int socket, const std::shared_ptr<Handler>& handler, bool wantsWritable) {
  epoll_event event{};
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    // 0 is what wakes the loop.
    if (++state_->added == 0) ++state_->added;
    state_->handlers[socket] = {state_->added, handler};
    event = eventsOf(socket, state_->added, wantsWritable);
    start();
  }
  const bool isAdded = epoll_ctl(state_->epoll.number(), EPOLL_CTL_ADD, socket, &event) == 0;
  if (isAdded) return;
  const int error = errno;
  remove(socket);
  TORCH_CHECK_WITH(DistNetworkError, false, "bagua: cannot wait for a socket: ", std::strerror(error));
}

void EventLoop::remove(int socket) {
  epoll_ctl(state_->epoll.number(), EPOLL_CTL_DEL, socket, nullptr);
  std::shared_ptr<Handler> removed;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const auto entry = state_->handlers.find(socket);
  if (entry == state_->handlers.end()) return;
  removed = std::move(entry->second.handler);
  state_->handlers.erase(entry);
}

void EventLoop::askForWritable(int socket, bool wants) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const auto entry = state_->handlers.find(socket);
  if (entry == state_->handlers.end()) return;
  epoll_event event = eventsOf(socket, entry->second.number, wants);
  epoll_ctl(state_->epoll.number(), EPOLL_CTL_MOD, socket, &event);
}

int EventLoop::callDue(State& state) {
  while (true) {
    std::function<void()> call;
    {
      const std::lock_guard<std::mutex> lock(state.mutex);
      if (state.later.empty()) return -1;
      const auto next = state.later.begin();
      const auto wait = next->first - Clock::now();
      if (wait.count() > 0) return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(wait).count());
      call = std::move(next->second);
      state.later.erase(next);
    }
    try {
      call();
    } catch (const std::exception& error) {
      LOG(ERROR) << "bagua: a call of the event loop has failed: " << error.what();
    }
  }
}

void EventLoop::handle(State& state, const epoll_event& event) {
  // It may have been removed, and the descriptor reused, since the loop has heard of the event.
  const auto present = [&] {
    const std::lock_guard<std::mutex> lock(state.mutex);
    const auto entry = state.handlers.find(socketOf(event));
    const bool isIt = entry != state.handlers.end() && entry->second.number == numberOf(event);
    return isIt ? entry->second.handler : nullptr;
  };
  const auto handler = present();
  if (!handler) return;
  try {
    // An error of a socket comes out when it is read from.
    if ((event.events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0) handler->onReadable();
    if ((event.events & EPOLLOUT) != 0) handler->onWritable();
  } catch (const std::exception& error) {
    // Nobody else would catch it, and the process would end. The handler reads next that the connection has.
    LOG(ERROR) << "bagua: a connection is given up: " << error.what();
    if (present()) shutdown(socketOf(event), SHUT_RDWR);
  }
}

void EventLoop::run(const std::shared_ptr<State>& state) {
  c10::setThreadName("bagua_wire");
  std::array<epoll_event, 64> events{};
  while (true) {
    const int count =
        epoll_wait(state->epoll.number(), events.data(), static_cast<int>(events.size()), callDue(*state));
    for (int i = 0; i < count; ++i) {
      if (numberOf(events[i]) != 0) {
        handle(*state, events[i]);
        continue;
      }
      uint64_t calls = 0;
      [[maybe_unused]] const ssize_t size = ::read(state->wakeUp.number(), &calls, sizeof(calls));
      const std::lock_guard<std::mutex> lock(state->mutex);
      if (!state->isStopping) continue;
      state->hasEnded = true;
      return state->ended.notify_all();
    }
  }
}

}  // namespace bagua::net

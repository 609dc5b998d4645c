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

epoll_event eventsOf(int socket, bool wantsWritable) {
  epoll_event event{};
  event.events = wantsWritable ? uint32_t{EPOLLIN} | uint32_t{EPOLLOUT} : uint32_t{EPOLLIN};
  event.data.fd = socket;
  return event;
}

}  // namespace

EventLoop::EventLoop() : state_(std::make_shared<State>()) {
  state_->epoll = FileDescriptor(epoll_create1(EPOLL_CLOEXEC));
  state_->wakeUp = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  TORCH_CHECK_WITH(DistNetworkError, state_->epoll.isOpen() && state_->wakeUp.isOpen(),
                   "bagua: cannot wait for sockets: ", std::strerror(errno));
  epoll_event event = eventsOf(state_->wakeUp.number(), false);
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
  std::map<int, std::shared_ptr<Handler>> dropped;
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
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->handlers[socket] = handler;
    start();
  }
  epoll_event event = eventsOf(socket, wantsWritable);
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
  removed = std::move(entry->second);
  state_->handlers.erase(entry);
}

void EventLoop::askForWritable(int socket, bool wants) {
  epoll_event event = eventsOf(socket, wants);
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
  std::shared_ptr<Handler> handler;
  {
    const std::lock_guard<std::mutex> lock(state.mutex);
    // The handler may have been removed, or the descriptor reused: a spurious call finds nothing to do (EAGAIN).
    const auto entry = state.handlers.find(event.data.fd);
    if (entry != state.handlers.end()) handler = entry->second;
  }
  if (!handler) return;
  try {
    // An error of a socket comes out when it is read from.
    if ((event.events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0) handler->onReadable();
    if ((event.events & EPOLLOUT) != 0) handler->onWritable();
  } catch (const std::exception& error) {
    // Nobody else would catch it, and the process would end. The handler reads next that the connection has.
    LOG(ERROR) << "bagua: a connection is given up: " << error.what();
    shutdown(event.data.fd, SHUT_RDWR);
  }
}

void EventLoop::run(const std::shared_ptr<State>& state) {
  c10::setThreadName("bagua_wire");
  std::array<epoll_event, 64> events{};
  while (true) {
    const int count =
        epoll_wait(state->epoll.number(), events.data(), static_cast<int>(events.size()), callDue(*state));
    for (int i = 0; i < count; ++i) {
      if (events[i].data.fd != state->wakeUp.number()) {
        handle(*state, events[i]);
        continue;
      }
      uint64_t calls = 0;
      [[maybe_unused]] const ssize_t size = ::read(state->wakeUp.number(), &calls, sizeof(calls));
      const std::lock_guard<std::mutex> lock(state->mutex);
      if (state->isStopping) return;
    }
  }
}

}  // namespace bagua::net

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

void EventLoop::stop() {
  std::map<int, std::shared_ptr<Handler>> dropped;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->isStopping = true;
    dropped.swap(state_->handlers);
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(state_->wakeUp.number(), &one, sizeof(one));
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void EventLoop::add(int socket, const std::shared_ptr<Handler>& handler, bool wantsWritable) {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->handlers[socket] = handler;
    if (!thread_.joinable() && !state_->isStopping) thread_ = std::thread([state = state_] { run(state); });
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

void EventLoop::run(const std::shared_ptr<State>& state) {
  c10::setThreadName("bagua_wire");
  std::array<epoll_event, 64> events{};
  while (true) {
    const int count = epoll_wait(state->epoll.number(), events.data(), static_cast<int>(events.size()), -1);
    for (int i = 0; i < count; ++i) {
      std::shared_ptr<Handler> handler;
      {
        const std::lock_guard<std::mutex> lock(state->mutex);
        if (state->isStopping) return;
        // Removed since, or another's that has the number now, whose calls then find nothing to do.
        const auto entry = state->handlers.find(events[i].data.fd);
        if (entry != state->handlers.end()) handler = entry->second;
      }
      if (!handler) continue;
      try {
        // What is wrong with a socket comes out when it is read from.
        if ((events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0) handler->onReadable();
        if ((events[i].events & EPOLLOUT) != 0) handler->onWritable();
      } catch (const std::exception& error) {
        // Nobody else would catch it, and the process would end. The handler reads next that the connection has.
        LOG(ERROR) << "bagua: a connection is given up: " << error.what();
        shutdown(events[i].data.fd, SHUT_RDWR);
      }
    }
  }
}

}  // namespace bagua::net

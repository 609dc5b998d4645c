// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/callback_threads.h"

#include <c10/util/thread_name.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace bagua {

// Owned by every thread: a callback may outlive the executor.
struct CallbackThreads::State {
  void serve();
  // On this thread, until none is left.
  void serveWaiting();

  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> tasks;
  size_t idle = 0;
  bool stopping = false;
};

void CallbackThreads::State::serve() {
  c10::setThreadName("bagua_callback");
  std::unique_lock<std::mutex> lock(mutex);
  while (true) {
    ++idle;
    wake.wait(lock, [this] { return stopping || !tasks.empty(); });
    --idle;
    if (tasks.empty()) return;
    {
      auto task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task();
      // What it captured goes here, without the mutex: a tensor may need the GIL.
    }
    lock.lock();
  }
}

void CallbackThreads::State::serveWaiting() {
  while (true) {
    std::function<void()> task;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (tasks.empty()) return;
      task = std::move(tasks.front());
      tasks.pop_front();
    }
    task();
  }
}

CallbackThreads::CallbackThreads() : state_(std::make_shared<State>()) {}

CallbackThreads::~CallbackThreads() { stop(); }

void CallbackThreads::run(std::function<void()> task) {
  bool needsThread = false;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->tasks.push_back(std::move(task));
    needsThread = state_->tasks.size() > state_->idle;
  }
  if (!needsThread) return state_->wake.notify_one();
  try {
    std::thread([state = state_] { state->serve(); }).detach();
  } catch (const std::system_error&) {
    // The system has no thread left: better here, where a callback that waits for a later operation waits in vain.
    state_->serveWaiting();
  }
}

void CallbackThreads::stop() {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stopping = true;
  }
  state_->wake.notify_all();
}

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#include "backend/host/callback_threads.h"

#include <c10/util/thread_name.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace bagua {

// Owned by every thread: a callback may outlive the executor.
struct CallbackThreads::State {
  void serve();

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

CallbackThreads::CallbackThreads() : state_(std::make_shared<State>()) {}

CallbackThreads::~CallbackThreads() { stop(); }

void CallbackThreads::run(std::function<void()> task) {
  bool needsThread = false;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->tasks.push_back(std::move(task));
    needsThread = state_->tasks.size() > state_->idle;
  }
  if (needsThread) {
    std::thread([state = state_] { state->serve(); }).detach();
  } else {
    state_->wake.notify_one();
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

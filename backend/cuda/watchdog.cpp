// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/watchdog.h"

#include <c10/util/Logging.h>
#include <c10/util/StringUtil.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <condition_variable>
#include <utility>
#include <vector>

#include "backend/operation/backend_error.h"

namespace bagua {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// How long a tensor may outlive the work on it, and how late a timeout may be.
constexpr milliseconds kWatchInterval{10};
// Whoever destroys a watchdog may hold the GIL, which the release of a tensor can need.
constexpr milliseconds kDestructorLimit{100};

bool isDone(const WatchedWork& work) {
  try {
    return work.deviceDone();
  } catch (...) {
    return false;  // the device has failed, and with it the work
  }
}

}  // namespace

struct Watchdog::Core {
  struct Entry {
    c10::intrusive_ptr<WatchedWork> work;
    Clock::time_point submitted;
    OperationLog::Token token = 0;
  };

  Core(GroupIdentity identity, std::shared_ptr<WatchedTransport> watched, std::function<void()> prepare,
       std::shared_ptr<OperationLog> log)
      : group(std::move(identity)),
        transport(std::move(watched)),
        prepareThread(std::move(prepare)),
        health(log ? std::move(log) : GroupHealth(group, nullptr).addLog("cuda")) {}

  void run() noexcept;
  void prepare();
  void inspect(const std::vector<Entry>& current);
  void failOnError(const std::vector<Entry>& unfinished);
  std::exception_ptr timeoutOf(const Entry& entry, size_t outstanding) const;
  void retire(const std::vector<c10::intrusive_ptr<WatchedWork>>& works);
  // What nobody but the thread has seen.
  void report(const std::exception_ptr& cause, const WatchedWork* culprit);
  void fail(const std::exception_ptr& cause, const WatchedWork* culprit);

  const GroupIdentity group;
  const std::shared_ptr<WatchedTransport> transport;
  const std::function<void()> prepareThread;
  const std::shared_ptr<OperationLog> health;

  std::mutex mutex;
  std::condition_variable wake;     // for the thread: the first entry has come, or it is to stop
  std::condition_variable changed;  // for everybody else: an entry has gone, or the thread has ended
  std::vector<Entry> entries;
  std::exception_ptr error;
  bool isStopping = false;
  bool hasEnded = false;
};

void Watchdog::Core::run() noexcept {
  c10::setThreadName("bagua_watchdog");
  prepare();
  std::unique_lock<std::mutex> lock(mutex);
  while (true) {
    wake.wait(lock, [this] { return isStopping || !entries.empty(); });
    if (entries.empty()) break;
    {
      std::vector<Entry> current = entries;
      lock.unlock();
      try {
        inspect(current);
      } catch (...) {
        report(makeBackendError("the watchdog failed: " + messageOf(std::current_exception())), nullptr);
      }
      // The last reference to a tensor may go here, for which the mutex must not be held.
      current.clear();
      lock.lock();
    }
    changed.notify_all();
    if (!entries.empty()) wake.wait_for(lock, kWatchInterval);
  }
  hasEnded = true;
  changed.notify_all();
}

void Watchdog::Core::prepare() {
  try {
    prepareThread();
  } catch (...) {
    report(makeBackendError("the watchdog of group '" + group.name +
                            "' could not start: " + messageOf(std::current_exception())),
           nullptr);
  }
}

void Watchdog::Core::inspect(const std::vector<Entry>& current) {
  std::vector<c10::intrusive_ptr<WatchedWork>> done;
  std::vector<Entry> unfinished;
  for (const auto& entry : current) {
    try {
      if (entry.work->deviceDone()) {
        done.push_back(entry.work);
      } else {
        unfinished.push_back(entry);
      }
    } catch (...) {
      // The device runs nothing any more, so it holds on to nothing either.
      done.push_back(entry.work);
      report(withContext(std::current_exception(), entry.work->operation(), group), entry.work.get());
    }
  }
  retire(done);
  if (!unfinished.empty()) failOnError(unfinished);
}

void Watchdog::Core::failOnError(const std::vector<Entry>& unfinished) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (error) return;
  }
  const std::string asyncError = transport->asyncError();
  if (!asyncError.empty()) {
    const WatchedWork& oldest = *unfinished.front().work;
    const auto cause = makeBackendError(asyncError + ". A peer may have died: its own output says why");
    return report(withContext(cause, oldest.operation(), group), &oldest);
  }
  const auto now = Clock::now();
  for (const auto& entry : unfinished) {
    // The group's health ends it earlier where it can, and knows more.
    const auto timeout = entry.work->operation().timeout;
    if (now - entry.submitted < timeout + health->patience(timeout)) continue;
    return report(timeoutOf(entry, unfinished.size()), entry.work.get());
  }
}

std::exception_ptr Watchdog::Core::timeoutOf(const Entry& entry, size_t outstanding) const {
  const Operation& operation = entry.work->operation();
  const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - entry.submitted);
  return makeBackendError(
      c10::str(describe(operation, group), " timed out after ", waited.count(), " ms, with a timeout of ",
               operation.timeout.count(), " ms; ", outstanding,
               " operation(s) of this rank have not completed. Check that every rank is alive and makes "
               "the same collective calls, of the same sizes, in the same order."));
}

void Watchdog::Core::retire(const std::vector<c10::intrusive_ptr<WatchedWork>>& works) {
  for (const auto& work : works) work->retire();
  const std::lock_guard<std::mutex> lock(mutex);
  std::erase_if(entries, [&](const Entry& entry) {
    if (std::find(works.begin(), works.end(), entry.work) == works.end()) return false;
    health->end(entry.token, entry.work->isSuccess());
    return true;
  });
}

void Watchdog::Core::report(const std::exception_ptr& cause, const WatchedWork* culprit) {
  LOG(ERROR) << "bagua: " << messageOf(cause);
  fail(culprit == nullptr ? cause : health->explain(cause, culprit->operation()), culprit);
}

void Watchdog::Core::fail(const std::exception_ptr& cause, const WatchedWork* culprit) {
  std::vector<Entry> failing;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (error) return;
    error = cause;
    failing = entries;
  }
  for (const auto& entry : failing) {
    if (entry.work.get() == culprit) {
      entry.work->fail(cause);
    } else if (!isDone(*entry.work)) {
      entry.work->fail(withContext(cause, entry.work->operation(), group));
    }
  }
  // Last: those who wait have their answer even if this takes long.
  try {
    transport->abort();
  } catch (...) {
    LOG(ERROR) << "bagua: aborting group '" << group.name << "' failed: " << messageOf(std::current_exception());
  }
}

Watchdog::Watchdog(GroupIdentity group, std::shared_ptr<WatchedTransport> transport,
                   std::function<void()> prepareThread, std::shared_ptr<OperationLog> health)
    : core_(std::make_shared<Core>(std::move(group), std::move(transport), std::move(prepareThread),
                                   std::move(health))) {}

Watchdog::~Watchdog() { stop(kDestructorLimit); }

void Watchdog::watch(const c10::intrusive_ptr<WatchedWork>& work, OperationLog::Kind kind) {
  std::exception_ptr error;
  const auto token = core_->health->begin(work->operation(), kind);
  {
    const std::lock_guard<std::mutex> lock(core_->mutex);
    error = core_->error;
    core_->entries.push_back({work, Clock::now(), token});
    if (core_->entries.size() == 1) core_->wake.notify_one();
  }
  {
    const std::lock_guard<std::mutex> lock(threadMutex_);
    if (!thread_.joinable()) startThread();
  }
  if (error) work->fail(withContext(error, work->operation(), core_->group));
}

void Watchdog::startThread() {
  {
    const std::lock_guard<std::mutex> lock(core_->mutex);
    core_->hasEnded = false;
  }
  thread_ = std::thread([core = core_] { core->run(); });
}

void Watchdog::fail(const std::exception_ptr& cause) { core_->fail(cause, nullptr); }

std::exception_ptr Watchdog::error() const {
  const std::lock_guard<std::mutex> lock(core_->mutex);
  return core_->error;
}

bool Watchdog::isIdle() const {
  const std::lock_guard<std::mutex> lock(core_->mutex);
  return core_->entries.empty();
}

bool Watchdog::waitIdle(milliseconds limit) {
  std::unique_lock<std::mutex> lock(core_->mutex);
  return core_->changed.wait_for(lock, limit, [this] { return core_->entries.empty(); });
}

void Watchdog::stop(milliseconds limit) {
  std::thread thread;
  {
    const std::lock_guard<std::mutex> lock(threadMutex_);
    thread = std::move(thread_);
  }
  if (!thread.joinable()) return;
  bool hasEnded = false;
  {
    std::unique_lock<std::mutex> lock(core_->mutex);
    core_->isStopping = true;
    core_->wake.notify_one();
    hasEnded = core_->changed.wait_for(lock, limit, [this] { return core_->hasEnded; });
  }
  if (hasEnded) {
    thread.join();
  } else {
    LOG(WARNING) << "bagua: rank " << core_->group.rank << " of group '" << core_->group.name
                 << "' leaves its watchdog behind: the device has not let go of an operation";
    thread.detach();
  }
}

}  // namespace bagua

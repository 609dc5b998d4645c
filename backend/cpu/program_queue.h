// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/cpu/callback_threads.h"
#include "backend/executor.h"
#include "backend/health/group_health.h"
#include "backend/operation/memory_use.h"
#include "backend/process_group/work_bagua.h"

namespace bagua {

// The programs of one group, in order over channels. A channel is a communicator with a thread of its own. A program's
// sequence number chooses its channel, so that ranks which come with different programs find out. Programs start in the
// order of submission; one that may not overlap has all channels to itself, and one that writes what another that is
// under way reads or writes, or the other way round, waits for that.
//
// The first failure ends the queue: what has not completed fails with it, and so does whatever comes later.
//
// All methods may be called from any thread. A Work or a program is never destroyed under the mutex: the last reference
// to a tensor that Python knows takes the GIL, whose owner may be waiting for the mutex.
class ProgramQueue {
 public:
  using Communicators = std::vector<std::unique_ptr<Communicator>>;

  ProgramQueue(GroupIdentity group, Communicators communicators, std::shared_ptr<OperationLog> health);

  struct Accepted {
    c10::intrusive_ptr<WorkBagua> work;
    // Whose thread is to run it.
    size_t channel;
  };
  Accepted push(Operation operation, std::vector<at::Tensor> results, Program program);
  // Runs the program at once, on this thread, if nothing else is running or waiting; null otherwise. It saves two
  // changes of threads, which take longer than a small exchange in shared memory.
  c10::intrusive_ptr<WorkBagua> runHere(const Operation& operation, const std::vector<at::Tensor>& results,
                                        Program& program);
  // The body of a channel's thread: until close() and the last program.
  void run(size_t channel);

  // Fails what has not completed, and from now on everything. `culprit` is the work that `cause` already names.
  void fail(const std::exception_ptr& cause, const WorkBagua* culprit = nullptr);
  void abortTransport();
  // Tells the other ranks why this one ends what has not completed.
  void reportAbort(const std::string& reason);
  void refuse();
  // Refuses new programs, and ends the threads when they have run the last one.
  void close();

  void checkUsable(const char* operation);
  // Returns whether the queue has become idle: nothing runs or waits, and nothing is left of what a program held.
  bool waitIdle(std::chrono::milliseconds limit);
  [[nodiscard]] bool isBusy(size_t channel);
  // Whether all programs have returned, though a channel is busy with what the last one held a little longer.
  [[nodiscard]] bool isTidying();
  [[nodiscard]] std::exception_ptr error();
  [[nodiscard]] uint64_t submitted();

 private:
  struct Entry {
    c10::intrusive_ptr<WorkBagua> work;
    Program program;
    MemoryUse memory = {};
  };
  struct Channel {
    std::unique_ptr<Communicator> communicator;
    // For its thread: there is a program for it, or no more will come.
    std::unique_ptr<std::condition_variable> turn = std::make_unique<std::condition_variable>();
    c10::intrusive_ptr<WorkBagua> running = {};
    MemoryUse memory = {};
    bool isBusy = false;
    bool isInProgram = false;
    // Has all channels to itself.
    bool isExclusive = false;
  };

  // Waits for the channel's next program; false: no more will come.
  bool next(size_t channel, Entry& entry);
  void runProgram(Entry& entry);
  void finish(Entry& entry);
  // What to raise for what a program threw.
  std::exception_ptr explain(const std::exception_ptr& failure, const Operation& operation);
  void complete(const c10::intrusive_ptr<WorkBagua>& work, const std::exception_ptr& error);
  [[nodiscard]] size_t channelOf(const Entry& entry) const {
    return entry.work->operation().sequence % channels_.size();
  }
  // Under the mutex.
  [[nodiscard]] bool isTurnOf(const Entry& entry) const;
  [[nodiscard]] bool isIdle() const;
  void wakeNext();
  void wakeAll();
  void begin(const Entry& entry);
  void checkUsableLocked(const char* operation) const;

  const GroupIdentity group_;
  const std::shared_ptr<OperationLog> health_;
  CallbackThreads callbacks_;

  std::mutex mutex_;
  // For waitIdle().
  std::condition_variable idle_;
  std::deque<Entry> entries_;
  std::vector<Channel> channels_;
  bool isRefusing_ = false;
  bool isClosed_ = false;
  uint64_t nextSequence_ = 0;
  std::exception_ptr error_;
};

}  // namespace bagua

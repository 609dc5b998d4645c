// SPDX-License-Identifier: Apache-2.0
#include "backend/host/monitored_barrier.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <vector>

#include "backend/host/messenger.h"
#include "backend/operation/operation.h"

namespace bagua {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Above those of users.
constexpr int kCame = Messenger::kTags;
constexpr int kAnswer = Messenger::kTags + 1;

milliseconds timeUntil(Clock::time_point end) {
  return std::max(std::chrono::duration_cast<milliseconds>(end - Clock::now()), milliseconds(1));
}

at::Tensor newByte() { return at::empty({1}, at::kByte); }

// Whether `work` ends in time; else `error` says why not.
bool succeeds(c10d::Work& work, Clock::time_point end, std::string& error) {
  try {
    if (work.wait(timeUntil(end))) return true;
    error = "the message was aborted";
  } catch (...) {
    error = messageOf(std::current_exception());
  }
  work.abort();
  return false;
}

void attend(MessageTransport& messages, int rank, Clock::time_point end, milliseconds timeout) {
  std::string error;
  const bool isThere = succeeds(*messages.send(newByte(), 0, kCame), end, error) &&
                       succeeds(*messages.receive(newByte(), 0, kAnswer), end, error);
  TORCH_CHECK(isThere, "Rank ", rank, " successfully reached monitoredBarrier, but received errors while waiting ",
              "for send/recv from rank 0. Please check rank 0 logs for faulty rank.\n Original exception: \n", error,
              " (timeout ", timeout.count(), " ms)");
}

}  // namespace

void monitoredBarrier(MessageTransport& messages, int rank, int size, milliseconds timeout, bool waitAllRanks) {
  const auto begin = Clock::now();
  const auto end = begin + timeout;
  if (rank != 0) return attend(messages, rank, end, timeout);
  std::vector<c10::intrusive_ptr<c10d::Work>> arrivals;
  for (int peer = 1; peer < size; ++peer) arrivals.push_back(messages.receive(newByte(), peer, kCame));
  std::vector<int> missing;
  std::string error;
  std::string processed;
  for (int peer = 1; peer < size; ++peer) {
    TORCH_CHECK(waitAllRanks || Clock::now() < end, "Rank 0 timed out in monitoredBarrier after ", timeout.count(),
                " ms.\n ",
                processed.empty() ? "No ranks successfully processed in monitoredBarrier."
                                  : "Successfully processed ranks: " + processed);
    if (succeeds(*arrivals[peer - 1], end, error)) {
      processed += (processed.empty() ? "" : ", ") + std::to_string(peer);
      continue;
    }
    missing.push_back(peer);
    TORCH_CHECK(waitAllRanks, "[Rank 0]: Rank ", peer, " failed to pass monitoredBarrier in ", timeout.count(),
                " ms. Original exception:\n", error);
  }
  std::string names;
  for (const int peer : missing) names += (names.empty() ? "" : ", ") + std::to_string(peer);
  TORCH_CHECK(missing.empty(), "[Rank 0]: Ranks ", names, " failed to pass monitoredBarrier in ", timeout.count(),
              " ms. Original exception:\n", error);
  std::vector<c10::intrusive_ptr<c10d::Work>> answers;
  for (int peer = 1; peer < size; ++peer) answers.push_back(messages.send(newByte(), peer, kAnswer));
  for (int peer = 1; peer < size; ++peer) {
    TORCH_CHECK(succeeds(*answers[peer - 1], end, error), "[Rank 0]: Rank ", peer,
                " failed to pass monitoredBarrier in ", timeout.count(), " ms. Original exception:\n", error);
  }
}

}  // namespace bagua

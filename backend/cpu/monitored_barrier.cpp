// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/monitored_barrier.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "backend/operation/operation.h"

namespace bagua {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Barriers without a program in between.
constexpr uint64_t kBitsOfBarriers = 20;
constexpr uint64_t kBitsOfNumber = 62;

// Rank 0's answer: the rank that it has given up waiting for.
constexpr int kNobody = -1;

milliseconds timeUntil(Clock::time_point end) {
  return std::max(std::chrono::duration_cast<milliseconds>(end - Clock::now()), milliseconds(1));
}

at::Tensor newByte() { return at::empty({1}, at::kByte); }

at::Tensor newAnswer(int missing = kNobody) {
  at::Tensor answer = at::empty({sizeof(missing)}, at::kByte);
  std::memcpy(answer.mutable_data_ptr(), &missing, sizeof(missing));
  return answer;
}

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

}  // namespace

void MonitoredBarrier::pass(uint64_t programs, milliseconds timeout, bool waitAllRanks) {
  uint64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (programs_ != programs) begun_ = 0;
    programs_ = programs;
    number = (programs << kBitsOfBarriers | begun_++) & ((uint64_t{1} << kBitsOfNumber) - 1);
  }
  const Limit limit{.timeout = timeout, .end = Clock::now() + timeout};
  if (rank_ != 0) return attend(number, limit);
  hearAll(number, limit, waitAllRanks);
}

void MonitoredBarrier::attend(uint64_t number, const Limit& limit) {
  at::Tensor answer = newAnswer();
  const auto answered = messages_->receiveNumbered(answer, 0, number);
  std::string error;
  const bool isAnswered = succeeds(*messages_->sendNumbered(newByte(), 0, number), limit.end, error) &&
                          succeeds(*answered, limit.end, error);
  int missing = kNobody;
  if (isAnswered) std::memcpy(&missing, answer.const_data_ptr(), sizeof(missing));
  TORCH_CHECK(missing != rank_, "Rank ", rank_,
              " came too late to monitoredBarrier: rank 0 had given up waiting for it. ",
              "The group can go on; this rank's next barrier is the one after that");
  if (missing != kNobody) error = c10::str("rank 0 has given up waiting for rank ", missing);
  TORCH_CHECK(isAnswered && missing == kNobody, "Rank ", rank_,
              " successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. ",
              "Please check rank 0 logs for faulty rank.\n Original exception: \n", error, " (timeout ",
              limit.timeout.count(), " ms)");
}

void MonitoredBarrier::hearAll(uint64_t number, const Limit& limit, bool waitAllRanks) {
  std::vector<c10::intrusive_ptr<c10d::Work>> arrivals;
  for (int peer = 1; peer < size_; ++peer) arrivals.push_back(messages_->receiveNumbered(newByte(), peer, number));
  std::vector<int> missing;
  std::string error;
  std::vector<int> processed;
  for (int peer = 1; peer < size_; ++peer) {
    if (!waitAllRanks && Clock::now() >= limit.end) {
      tellGivenUp(number, {peer});
      TORCH_CHECK(false, "Rank 0 timed out in monitoredBarrier after ", limit.timeout.count(), " ms.\n ",
                  processed.empty() ? "No ranks successfully processed in monitoredBarrier."
                                    : "Successfully processed ranks: " + c10::Join(", ", processed));
    }
    if (succeeds(*arrivals[peer - 1], limit.end, error)) {
      processed.push_back(peer);
      continue;
    }
    missing.push_back(peer);
    if (!waitAllRanks) break;
  }
  if (!missing.empty()) tellGivenUp(number, missing);
  TORCH_CHECK(missing.empty(), "[Rank 0]: ", waitAllRanks ? "Ranks " : "Rank ", c10::Join(", ", missing),
              " failed to pass monitoredBarrier in ", limit.timeout.count(), " ms. Original exception:\n", error);
  std::vector<c10::intrusive_ptr<c10d::Work>> answers;
  for (int peer = 1; peer < size_; ++peer) answers.push_back(messages_->sendNumbered(newAnswer(), peer, number));
  for (int peer = 1; peer < size_; ++peer) {
    TORCH_CHECK(succeeds(*answers[peer - 1], limit.end, error), "[Rank 0]: Rank ", peer,
                " failed to pass monitoredBarrier in ", limit.timeout.count(), " ms. Original exception:\n", error);
  }
}

void MonitoredBarrier::tellGivenUp(uint64_t number, const std::vector<int>& missing) {
  for (int peer = 1; peer < size_; ++peer) {
    const bool isMissing = std::ranges::find(missing, peer) != missing.end();
    try {
      messages_->sendNumbered(newAnswer(isMissing ? peer : missing.front()), peer, number);
    } catch (const std::exception& error) {
      LOG(WARNING) << "bagua: rank 0 could not tell rank " << peer
                   << " that a monitored barrier was given up: " << error.what();
    }
  }
}

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#include "backend/nccl_net/comm.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "backend/nccl_net/log.h"

namespace bagua::nccl_net {
namespace {

using Clock = std::chrono::steady_clock;

// NCCL's tags are below.
constexpr uint64_t kGreeting = std::numeric_limits<uint64_t>::max();
constexpr uint64_t kFarewell = kGreeting - 1;
// A peer that has closed its end has had all that it wanted. A thread of ours may just be coming back from handing the
// last of it to the kernel.
constexpr std::chrono::milliseconds kGraceAfterLeave{200};

// Members of a pair have no ranks that a user would know. What the transport says of them is left out.
std::string withoutRanks(std::string text) {
  if (text.find("has left the group") != std::string::npos) return "it has closed its end";
  text.resize(std::min(text.find(" (rank "), text.size()));
  return text;
}

bool overlaps(const Comm::Range& one, const Comm::Range& other) {
  return one.data < other.data + other.size && other.data < one.data + one.size;
}

}  // namespace

net::MessageKey Comm::greetingKey() {
  return {.stream = kGreeting, .source = static_cast<uint32_t>(End::kSender), .index = 0};
}

Comm::Comm(std::shared_ptr<net::Transport> transport, uint64_t id, End end, const net::ProcessAddress& peer)
    : transport_(std::move(transport)), end_(end), peer_(peer.address) {
  const int self = static_cast<int>(end);
  std::vector<net::ProcessAddress> members(2, transport_->address());
  members[other()] = peer;
  group_ = transport_->join(id, self, members);
  farewell_ = group_->receive(other(), kFarewell, 0, {.signal = signal_});
  group_->watch(other());
  if (end == End::kReceiver) {
    // The greeting has come: it is not kept.
    group_->receive(other(), kGreeting, 0, {});
    return;
  }
  const std::string address = transport_->address().toString();
  greeting_ = group_->send(other(), kGreeting, 0, {.context = {address.begin(), address.end()}, .signal = signal_});
}

Comm::~Comm() {
  // What has gone before stays on its way; the rest is given up.
  requests_.clear();
  greeting_.reset();
  farewell_.reset();
  group_->leave();
}

bool Comm::isOpen(Result& result) {
  const std::lock_guard<std::mutex> lock(mutex_);
  result = failure_;
  if (!greeting_ || failure_ != Result::kSuccess) return failure_ == Result::kSuccess;
  const auto state = greeting_->state();
  if (state.isComplete) greeting_.reset();
  const std::string error = state.isComplete ? "" : state.error;
  if (!error.empty()) result = fail(Result::kRemoteError, "cannot connect: " + error);
  return state.isComplete;
}

std::pair<uint64_t, uint32_t> Comm::nextKey(int tag) {
  const uint64_t count = counts_[tag]++;
  return {(uint64_t{static_cast<uint32_t>(tag)} << 32U) | count >> 32U, static_cast<uint32_t>(count)};
}

Comm::Request* Comm::takeRequest() {
  if (free_.empty()) {
    if (requests_.size() == static_cast<size_t>(kMostRequests) * kMostGrouped) return nullptr;
    requests_.push_back(std::make_unique<Request>(*this));
    free_.push_back(requests_.back().get());
  }
  Request* const request = free_.back();
  free_.pop_back();
  request->isUsed_ = true;
  request->seen_.reset();
  return request;
}

void Comm::giveBack(Request& request) {
  request.messages_.clear();
  request.isUsed_ = false;
  free_.push_back(&request);
}

Result Comm::send(Range data, int tag, Request*& request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_ != Result::kSuccess) return failure_;
  // Small messages leave, whether anybody takes them or not.
  if (const auto state = farewell_->state(); !state.error.empty()) return fail(Result::kRemoteError, state.error);
  request = takeRequest();
  if (request == nullptr) return Result::kSuccess;
  const auto [stream, index] = nextKey(tag);
  auto& message = request->messages_.emplace_back(Request::Message{.range = data, .size = data.size});
  message.sending = group_->send(other(), stream, index,
                                 {.data = data.data, .size = data.size, .ready = data.size, .signal = signal_});
  return Result::kSuccess;
}

Result Comm::receive(const std::vector<Part>& parts, Request*& request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_ != Result::kSuccess) return failure_;
  request = takeRequest();
  if (request == nullptr) return Result::kSuccess;
  for (const Part& part : parts) {
    const auto [stream, index] = nextKey(part.tag);
    auto& message = request->messages_.emplace_back(Request::Message{.range = {part.data, part.size}});
    message.receiving = group_->receive(other(), stream, index,
                                        {.data = part.data, .size = part.size, .isMost = true, .signal = signal_});
  }
  return Result::kSuccess;
}

Result Comm::test(Request& request, bool& isComplete, int* sizes) {
  isComplete = false;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_ != Result::kSuccess) return failure_;
  if (!request.isUsed_) return fail(Result::kInternalError, "NCCL asks for a request that is complete already");
  const uint64_t count = signal_->count();
  if (request.seen_ == count && !leftAt_) return Result::kSuccess;
  request.seen_ = count;
  bool isAll = true;
  for (auto& message : request.messages_) {
    if (message.isComplete) continue;
    std::string error = "its memory was given up";
    if (message.receiving) {
      const auto state = message.receiving->state();
      message.isComplete = state.isComplete();
      error = state.error;
      message.size = state.total.value_or(0);
      if (message.size > message.range.size) {
        return fail(Result::kInvalidUsage,
                    c10::str("a message of ", message.size, " bytes has come for ", message.range.size,
                             ": the ranks do not make the same calls, or have other settings of NCCL"));
      }
    } else if (message.sending) {
      const auto state = message.sending->state();
      message.isComplete = state.isComplete;
      error = state.error;
      if (!message.isComplete && error.empty() && isPeerGone()) error = farewell_->state().error;
    }
    if (!message.isComplete && !error.empty()) return fail(Result::kRemoteError, error);
    isAll = isAll && message.isComplete;
  }
  if (!isAll) return Result::kSuccess;
  isComplete = true;
  for (size_t i = 0; sizes != nullptr && i < request.messages_.size(); ++i) {
    sizes[i] = static_cast<int>(request.messages_[i].size);
  }
  giveBack(request);
  return Result::kSuccess;
}

void Comm::forget(const Range& range) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& request : requests_) {
    for (auto& message : request->messages_) {
      if (!overlaps(message.range, range)) continue;
      message.sending.reset();
      message.receiving.reset();
    }
  }
}

bool Comm::isPeerGone() {
  if (farewell_->state().error.empty()) return false;
  if (!leftAt_) leftAt_ = Clock::now();
  return Clock::now() - *leftAt_ > kGraceAfterLeave;
}

Result Comm::fail(Result result, const std::string& why) {
  failure_ = result;
  warn(c10::str(end_ == End::kSender ? "sending to " : "receiving from ", peer_.text(), ": ", withoutRanks(why)));
  return result;
}

}  // namespace bagua::nccl_net

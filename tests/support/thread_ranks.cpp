// SPDX-License-Identifier: Apache-2.0
#include "tests/support/thread_ranks.h"

#include <c10/util/Exception.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>

#include "backend/host/host_communicator.h"
#include "backend/tensor_bytes.h"

namespace bagua::testing {
namespace {

// What the ranks show each other between two meetings.
struct Shown {
  at::Tensor tensor;
  Communicator::Splits splits;
};

class MeetingPoint {
 public:
  explicit MeetingPoint(int size) : shown(size), size_(size) {}

  void meet() {
    std::unique_lock<std::mutex> lock(mutex_);
    TORCH_CHECK(!failed_, "a peer has failed");
    const uint64_t meeting = meetings_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++meetings_;
      everybody_.notify_all();
      return;
    }
    everybody_.wait(lock, [&] { return meetings_ != meeting || failed_; });
    TORCH_CHECK(meetings_ != meeting, "a peer has failed");
  }

  // Keeps the first error and wakes everybody.
  void fail(std::exception_ptr error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failed_) first_ = std::move(error);
    failed_ = true;
    everybody_.notify_all();
  }

  void rethrowFirst() const {
    if (first_) std::rethrow_exception(first_);
  }

  std::vector<Shown> shown;

 private:
  const int size_;
  std::mutex mutex_;
  std::condition_variable everybody_;
  int arrived_ = 0;
  uint64_t meetings_ = 0;
  bool failed_ = false;
  std::exception_ptr first_;
};

// Moves bytes between threads: show, meet, copy, meet.
class ThreadNetwork final : public Communicator {
 public:
  ThreadNetwork(int rank, int size, std::shared_ptr<const HostTopology> topology, MeetingPoint& point)
      : Communicator(rank, size, std::move(topology)), point_(point) {}

  void broadcast(at::Tensor& tensor, int root) override {
    show(tensor, {});
    if (rank() != root) flatOf(tensor).copy_(flatOf(point_.shown[root].tensor));
    if (rank() == root) countSentToEach(static_cast<int64_t>(tensor.nbytes()));
    point_.meet();
  }

  void allGather(at::Tensor& output, const at::Tensor& input) override {
    show(input, {});
    at::Tensor flat = flatOf(output);
    for (int peer = 0; peer < size(); ++peer) {
      flat.narrow(0, peer * input.numel(), input.numel()).copy_(flatOf(point_.shown[peer].tensor));
    }
    countSentToEach(static_cast<int64_t>(input.nbytes()));
    point_.meet();
  }

  void allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                const Splits& inputSplits) override {
    const Splits in = inputSplits.empty() ? Splits(size(), input.numel() / size()) : inputSplits;
    const Splits out = outputSplits.empty() ? Splits(size(), output.numel() / size()) : outputSplits;
    show(input, in);
    at::Tensor flat = flatOf(output);
    int64_t begin = 0;
    for (int peer = 0; peer < size(); ++peer) {
      const auto& [tensor, splits] = point_.shown[peer];
      TORCH_CHECK(splits[rank()] == out[peer], "rank ", rank(), " expects ", out[peer], " elements of rank ", peer,
                  ", which sends ", splits[rank()]);
      const int64_t from = std::accumulate(splits.begin(), splits.begin() + rank(), int64_t{0});
      flat.narrow(0, begin, out[peer]).copy_(flatOf(tensor).narrow(0, from, out[peer]));
      begin += out[peer];
    }
    countSentParts(input, in);
    point_.meet();
  }

  void barrier() override { point_.meet(); }

  void allReduce(at::Tensor& tensor, const ReduceOp& op) override {
    TORCH_CHECK(op == ReduceOp::SUM, "the network below a host communicator only knows sums");
    show(tensor, {});
    at::Tensor sum = flatOf(point_.shown[0].tensor).clone();
    for (int peer = 1; peer < size(); ++peer) sum += flatOf(point_.shown[peer].tensor);
    countSentEvenly(2 * static_cast<int64_t>(tensor.nbytes()) * (size() - 1) / size());
    point_.meet();
    flatOf(tensor).copy_(sum);
  }
  void reduce(at::Tensor&, int, const ReduceOp&) override { movesBytesOnly(); }
  void reduceScatter(at::Tensor&, const at::Tensor&, const ReduceOp&) override { movesBytesOnly(); }

 private:
  void show(const at::Tensor& tensor, Splits splits) {
    point_.shown[rank()] = {tensor, std::move(splits)};
    point_.meet();
  }
  static void movesBytesOnly() {
    TORCH_CHECK(false, "the network below a host communicator moves bytes and adds them up");
  }

  MeetingPoint& point_;
};

}  // namespace

void runRanks(int size, const std::function<void(Communicator&)>& body, std::vector<std::string> hosts) {
  if (hosts.empty()) hosts.assign(size, "host");
  const auto topology = std::make_shared<const HostTopology>(hosts);
  MeetingPoint point(size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        HostCommunicator communicator(std::make_unique<ThreadNetwork>(rank, size, topology, point), topology);
        body(communicator);
      } catch (...) {
        point.fail(std::current_exception());
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  point.rethrowFirst();
}

}  // namespace bagua::testing

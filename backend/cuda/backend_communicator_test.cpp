// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/backend_communicator.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace bagua {
namespace {

// Its other operations, such as the barrier, are those of c10d::Backend, which throw.
class RecordingBackend final : public c10d::Backend {
 public:
  RecordingBackend() : Backend(/*rank=*/1, /*size=*/2) {}

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    reduced.push_back(tensors.front());
    timeouts.push_back(options.timeout);
    return nullptr;
  }

  std::vector<at::Tensor> reduced;
  std::vector<std::chrono::milliseconds> timeouts;
};

TEST(BackendCommunicator, ABarrierReducesOneByteOnTheDeviceOfTheHook) {
  const auto backend = c10::make_intrusive<RecordingBackend>();
  const auto topology = std::make_shared<const HostTopology>(std::vector<std::string>{"a", "a"});
  BackendCommunicator communicator(backend, topology, at::kMeta);
  communicator.setDeadline(std::chrono::steady_clock::now() + std::chrono::seconds(60));
  communicator.barrier();
  ASSERT_EQ(backend->reduced.size(), 1U);
  EXPECT_EQ(backend->reduced.front().nbytes(), 1U);
  EXPECT_EQ(backend->reduced.front().device(), at::kMeta);
  EXPECT_GT(backend->timeouts.front(), std::chrono::seconds(30));
  EXPECT_LE(backend->timeouts.front(), std::chrono::seconds(60));
}

}  // namespace
}  // namespace bagua

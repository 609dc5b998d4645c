// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "backend/cuda/channel_turns.h"
#include "backend/cuda/stream_channel.h"
#include "backend/cuda/watchdog.h"
#include "backend/executor.h"

namespace bagua {

// Programs on CUDA tensors: submit() runs a program at once, in the thread that calls it, with the communication stream
// as the current stream, so that all it does is enqueued there. README.md has the rules of streams and lifetimes.
class StreamExecutor : public virtual Executor {
 public:
  using Channels = std::vector<std::shared_ptr<StreamChannel>>;

  // One channel, or two that ChannelTurns chooses from. `health` as for the Watchdog.
  StreamExecutor(GroupIdentity group, Channels channels, at::Device device,
                 std::shared_ptr<OperationLog> health = nullptr);
  ~StreamExecutor() override;

  c10::intrusive_ptr<c10d::Work> submit(Operation operation, std::vector<at::Tensor> results, Program program) override;
  void abort(const std::string& reason) override;
  void shutdown() override;
  [[nodiscard]] std::exception_ptr error() const override;
  [[nodiscard]] uint64_t submitted() const override { return nextSequence_; }

 protected:
  struct Launch {
    Operation operation;
    std::vector<at::Tensor> results;
    Program program;
    // How many sequence numbers it takes: none if it holds messages only.
    uint64_t numbers = 1;
    // Null: a new one.
    c10::intrusive_ptr<WorkCuda> work;
    // What the program has to come after, besides the caller's current stream.
    std::vector<at::cuda::CUDAEvent> after;
  };

  // On the channel whose turn it is.
  c10::intrusive_ptr<WorkCuda> launch(Launch launch);
  c10::intrusive_ptr<WorkCuda> launchOn(StreamChannel& channel, Launch launch);
  void checkUsable(const Operation& operation) const;
  [[nodiscard]] const GroupIdentity& group() const { return group_; }
  [[nodiscard]] at::Device device() const { return device_; }
  // `position` as in ChannelSet; those of programs are negative.
  void addChannel(int position, std::shared_ptr<StreamChannel> channel) {
    channels_->add(position, std::move(channel));
  }

 private:
  // What the program threw when ranks may be out of step, as StreamChannel::enqueue() has it.
  std::exception_ptr enqueueInTurn(Launch& launch);
  std::exception_ptr enqueueOn(StreamChannel& channel, Launch& launch);
  // Watches and publishes what was enqueued: under no lock, as callbacks may launch.
  c10::intrusive_ptr<WorkCuda> follow(const Launch& launch, const std::exception_ptr& failure);
  void keepCaptured(const c10::intrusive_ptr<WorkCuda>& work);

  const GroupIdentity group_;
  const at::Device device_;
  const Channels programChannels_;
  // Held from the choice of a channel to the last enqueueing there: the order of programs is one.
  std::mutex programsMutex_;
  ChannelTurns turns_;
  const std::shared_ptr<ChannelSet> channels_;
  const std::shared_ptr<OperationLog> health_;
  Watchdog watchdog_;
  std::atomic<uint64_t> nextSequence_ = 0;
  std::atomic<bool> isShutDown_ = false;

  std::mutex capturedMutex_;
  // Nobody can watch these: their tensors are kept until the capture is over.
  std::vector<c10::intrusive_ptr<WorkCuda>> captured_;
};

// Over a communicator that belongs to somebody else: for hooks on a model whose group is not ours. `device` has an
// index.
std::shared_ptr<Executor> makeStreamExecutor(GroupIdentity group, std::unique_ptr<Communicator> communicator,
                                             at::Device device, std::shared_ptr<OperationLog> health = nullptr);

}  // namespace bagua

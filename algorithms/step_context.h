// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "algorithms/stage.h"
#include "backend/communicator.h"

namespace bagua {

// What an algorithm may do on the thread that trains: reach the model's weights and submit programs.
class StepContext {
 public:
  using Task = std::function<void(Communicator&, StageSeconds&)>;

  virtual ~StepContext() = default;

  // The name that the algorithm is registered under.
  [[nodiscard]] virtual const std::string& algorithm() const = 0;
  // The trainable parameters, in the model's order.
  [[nodiscard]] virtual const std::vector<at::Tensor>& parameters() const = 0;
  // By parameter, the layer of the model that it belongs to: a number that neighbours in the model's order share. Empty
  // where nobody knows: each parameter is then a layer.
  [[nodiscard]] virtual const std::vector<int64_t>& layers() const = 0;
  // What the model holds beside its parameters (running statistics), in its order.
  [[nodiscard]] virtual const std::vector<at::Tensor>& buffers() const = 0;
  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  // Of what is the same on all ranks one speaks to the user, and this tells whether it is this one.
  [[nodiscard]] virtual bool isSpeaker() const = 0;
  // Which of the ranks share a host.
  [[nodiscard]] virtual const HostTopology& topology() const = 0;

  // Throws where the backward of a forward is still to come, which needs the weights as they are. `call` is what the
  // user called.
  virtual void checkWeightsAreFree(const char* call) const = 0;
  // Throws on all ranks, and changes nothing, where that is so on any of them, or where they have not taken the same
  // number of steps. Collective.
  virtual void checkThatAllCan(const char* call) = 0;

  // Runs `task` after all earlier programs of the model's group. What it sends and how long its stages take is counted,
  // and `tensors` as what it carries. `name` is a literal. The profiler of this thread sees the stages of a program
  // that is waited for now; one that outlasts the caller may outlast the profiler. Programs `kNowInAnyOrder` may run
  // beside each other.
  enum class Wait { kNow, kNowInAnyOrder, kLater };
  virtual c10::intrusive_ptr<c10d::Work> submit(const char* name, const std::vector<at::Tensor>& tensors, Wait wait,
                                                Task task) = 0;
  // The same on a group of its own, whose programs run beside those of the model's group. Only for algorithms that
  // declare runsInBackground.
  virtual c10::intrusive_ptr<c10d::Work> submitInBackground(const char* name, const std::vector<at::Tensor>& tensors,
                                                            Task task) = 0;
  // The same among the ranks that hold the other parts of this rank's weights, which are members of other groups. Null
  // where every rank has them whole.
  virtual c10::intrusive_ptr<c10d::Work> submitAmongShards(const char* name, const std::vector<at::Tensor>& tensors,
                                                           Task task) = 0;
  // One more round of communication in the statistics.
  virtual void countRound() = 0;
  // For the statistics, what the algorithm holds beside the model: what it is -> bytes. Replaces what was noted before.
  virtual void noteMemory(std::map<std::string, int64_t> bytes) = 0;
  // For the statistics, what the algorithm has chosen for options that were left to it: the option -> its value.
  // Replaces what was noted before.
  virtual void noteChosen(std::map<std::string, int64_t> values) = 0;
};

}  // namespace bagua

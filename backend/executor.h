// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/communicator.h"
#include "backend/operation/operation.h"
#include "backend/torch_compat.h"

namespace bagua {

// Straight-line code against a Communicator. Captures the tensors that it reads and writes.
using Program = std::function<void(Communicator&)>;

// Runs the programs of one group on one device, first in first out: that one order, the same on every rank, is what
// allows a program to make several collective calls. On the CPU a thread runs them, or several between hosts, where
// those that may overlap are under way together; on CUDA they are enqueued on one communication stream (or by turns on
// two, where the user wants it), in the order of submission. All methods may be called from any thread.
//
// A program that throws leaves the ranks out of step, so it fails its Work and every later one of this executor.
class Executor {
 public:
  virtual ~Executor() = default;

  // `results` is the value of the Work's future and result(). `operation.sequence` is filled in here.
  virtual c10::intrusive_ptr<c10d::Work> submit(Operation operation, std::vector<at::Tensor> results,
                                                Program program) = 0;

  // Fails everything that has not completed, with `reason`. Later calls fail at once.
  virtual void abort(const std::string& reason) = 0;
  // Lets what was submitted finish, for a short while, then aborts. Idempotent.
  virtual void shutdown() = 0;
  // The error that ended this executor, if any.
  [[nodiscard]] virtual std::exception_ptr error() const = 0;
  // How many programs have been accepted: the next sequence number.
  [[nodiscard]] virtual uint64_t submitted() const = 0;
};

// Where a hook finds the executor of the device that its gradients live on.
class ExecutorProvider {
 public:
  virtual ~ExecutorProvider() = default;
  // The executor lives on while it is held, and refuses work once its group has other members or has ended.
  virtual std::shared_ptr<Executor> executorFor(at::Device device) = 0;
  // Whether what the calling thread submits for `device` now is recorded into a CUDA graph, which may run it any number
  // of times. Also of a group that has ended.
  [[nodiscard]] virtual bool isCapturing(at::Device device) const;
  [[nodiscard]] virtual GroupIdentity identity() const = 0;
  [[nodiscard]] virtual std::chrono::milliseconds timeout() const = 0;
  // Changes when the group has other members: then what was made for the former ones is of no use. 0: it never does.
  [[nodiscard]] virtual uint64_t epoch() const { return 0; }
  // Who shares a host.
  [[nodiscard]] virtual std::shared_ptr<const HostTopology> topology() const = 0;
};

}  // namespace bagua

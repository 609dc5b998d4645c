// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>

#include "backend/communicator.h"

// Programs of CPU tensors that go the ways of a device (AsOnDevice), watched for what a device would punish.
namespace bagua::testing {

// As long as one lives, its thread may only enqueue. An operation of ATen throws an error where, on a device,
//  - the CPU would wait: it reads a value (item()), or the shape of a result depends on values (nonzero());
//  - tensors would be copied between the CPU and the device: to() names a device, or what the CPU has made goes
//    to the device, unless by a copy that says it does not block;
//  - tensors of both would meet, but for a number.
// What was made without naming a device is the CPU's, and what was made of that alone. A read through data_ptr() is
// not seen.
class OnlyEnqueues {
 public:
  OnlyEnqueues();
  ~OnlyEnqueues();
  OnlyEnqueues(const OnlyEnqueues&) = delete;
  OnlyEnqueues& operator=(const OnlyEnqueues&) = delete;

 private:
  const c10::impl::IncludeDispatchKeyGuard watched_;
};

// Runs a program whose tensors are on `device`: watched where they go the ways of a device, with a communicator that,
// as NCCL's, takes tensors of the device only and no pieces.
void runProgram(at::Device device, Communicator& communicator, const std::function<void(Communicator&)>& program);

}  // namespace bagua::testing

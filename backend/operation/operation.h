// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/torch_compat.h"

namespace bagua {

// Which gradients travel together, and in which order.
struct GradientList {
  // As messages show it: "5-0", positions of parameters.
  std::string text;
  uint32_t hash = 0;
};

// One logical operation as a user thinks of it: a collective, a message, or a whole fused program of a hook. It has one
// sequence number, one timeout, one Work, and one way to be named in an error.
struct Operation {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  // Static string: also the profiler's title.
  const char* name = "";
  at::ScalarType dtype = at::ScalarType::Undefined;
  int64_t numel = 0;
  // Root, source or destination rank; -1 where there is none.
  int peer = -1;
  std::chrono::milliseconds timeout{0};
  // Given by the executor: 0, 1, 2, ... in the order of submission. Messages between two ranks are not counted.
  uint64_t sequence = 0;
  // What the profiler shows as inputs, where that is not the results. The Work drops them once it has told it.
  std::vector<at::Tensor> inputs = {};
  // Whether the caller waits at once, so that it may run the operation itself.
  bool isAwaited = false;
  // Whether it may run beside the operations before and after it of which the same is said, where they use other
  // memory.
  bool mayOverlap = false;
  // Whether the profiler of the submitting thread times it as a whole. Not one that may outlast the profiler, which
  // would then be told of the end of something that it has freed.
  bool isProfiled = true;
  // c10d::ReduceOp::RedOpType, where it reduces.
  int reduceOp = -1;
  // Elements that all ranks must have alike when they come to this operation.
  static constexpr int64_t kOwnNumel = -1;  // those of `numel`
  static constexpr int64_t kAnyNumel = -2;  // ranks may bring different sizes
  int64_t commonNumel = kOwnNumel;
  // What else has to be the same on all ranks, as a text for messages: a hook's algorithm and options, the sizes of a
  // list. Null: nothing.
  std::shared_ptr<const std::string> configuration = nullptr;
  // The gradients of a bucket, which the ranks compare on their own. Null where there are none, or nobody knows them.
  std::shared_ptr<const GradientList> gradients = nullptr;
  // The step that the algorithm is at, where all ranks have to be at the same; else 0.
  uint32_t step = 0;
};

// Who runs operations: what every error message starts with.
struct GroupIdentity {
  std::string name;
  int rank = 0;
  int size = 1;
};

// `operation` without its inputs, for whoever keeps it.
Operation withoutInputs(Operation operation);

// "bagua:all_reduce #12 (Float[1024]) on rank 1 of 4, group 'default_pg'"
std::string describe(const Operation& operation, const GroupIdentity& group);

// A c10::DistBackendError that says which operation failed, unless `cause` does already, and keeps the cause's text.
std::exception_ptr withContext(const std::exception_ptr& cause, const Operation& operation, const GroupIdentity& group);

// The text of any exception.
std::string messageOf(const std::exception_ptr& error);

}  // namespace bagua

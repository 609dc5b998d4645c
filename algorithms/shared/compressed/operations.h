// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "backend/executor.h"

// The collectives of collectives.h as single operations of a group, for users. All ranks in rank order take part,
// wherever they are. Values are rounded to the nearest code, and nothing is remembered between two calls.
//
// Tensors are contiguous, float32, float64, float16 or bfloat16, or a ValueError or TypeError names what came. Ranks
// that do not ask for the same get the mismatch error.
namespace bagua::compressed {

struct CallOptions {
  // As in CodecRegistry.
  std::string codec;
  // Mean over the ranks, or their sum.
  bool average = true;
  // Whether the caller waits at once.
  bool isAwaited = false;
};

// In place, the same bits on all ranks.
c10::intrusive_ptr<c10d::Work> submitAllReduce(ExecutorProvider& group, const at::Tensor& tensor,
                                               const CallOptions& options);
// `input` holds a part of the size of `output` for every rank.
c10::intrusive_ptr<c10d::Work> submitReduceScatter(ExecutorProvider& group, const at::Tensor& output,
                                                   const at::Tensor& input, const CallOptions& options);
// `output` holds a part of the size of `input` of every rank: the same bits on all ranks, what this one sent included.
c10::intrusive_ptr<c10d::Work> submitAllGather(ExecutorProvider& group, const at::Tensor& output,
                                               const at::Tensor& input, const CallOptions& options);

}  // namespace bagua::compressed

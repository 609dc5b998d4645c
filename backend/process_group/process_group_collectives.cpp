// SPDX-License-Identifier: Apache-2.0
// The collectives of ProcessGroupBagua that work on one flat tensor per rank, and their coalesced forms.
#include <ATen/Context.h>

#include <utility>

#include "backend/cpu/collectives/reduction.h"
#include "backend/operation/sparse_reduction.h"
#include "backend/operation/tensor_bytes.h"
#include "backend/process_group/barrier_device.h"
#include "backend/process_group/list_sizes.h"
#include "backend/process_group/process_group_bagua.h"
#include "backend/security/job_security.h"

namespace bagua {

using c10d::OpType;
using WorkPtr = ProcessGroupBagua::WorkPtr;
using Tensors = std::vector<at::Tensor>;

WorkPtr ProcessGroupBagua::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  constexpr const char* kName = "bagua:broadcast";
  at::Tensor tensor = checks(kName).single(tensors);
  checks(kName).rank(opts.rootRank, "root");
  return executorFor(tensor.device())
      ->submit(operation(OpType::BROADCAST, kName, tensor, opts, opts.rootRank), tensors,
               [tensor, root = static_cast<int>(opts.rootRank)](Communicator& communicator) mutable {
                 inPlainOrder(tensor, [&](at::Tensor& plain) { communicator.broadcast(plain, root); });
               });
}

WorkPtr ProcessGroupBagua::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  constexpr const char* kName = "bagua:all_reduce";
  if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
  at::Tensor tensor = checks(kName).single(tensors);
  reduction::checkSupported(checks(kName), opts.reduceOp, tensor.scalar_type());
  return executorFor(tensor.device())
      ->submit(operation(OpType::ALLREDUCE, kName, tensor, opts, opts.reduceOp), tensors,
               [tensor, op = opts.reduceOp](Communicator& communicator) mutable {
                 inPlainOrder(tensor, [&](at::Tensor& plain) { communicator.allReduce(plain, op); });
               });
}

WorkPtr ProcessGroupBagua::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  constexpr const char* kName = "bagua:all_reduce_sparse";
  checks(kName).count(tensors.size(), 1, "tensor");
  at::Tensor tensor = tensors[0];
  TORCH_CHECK_VALUE(tensor.is_sparse(), checks(kName).where(), ": tensor must be sparse, got layout ", tensor.layout());
  const c10d::ReduceOp::RedOpType op = opts.reduceOp;
  reduction::checkSupported(checks(kName), opts.reduceOp, tensor.scalar_type());
  TORCH_CHECK_VALUE(op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG, checks(kName).where(),
                    ": sparse tensors can be reduced with SUM and AVG only");
  return executorFor(tensor.device())
      ->submit(operation(c10d::OpType::_ALLREDUCE_SPARSE, kName, tensor, opts, opts.reduceOp), tensors,
               [tensor, average = op == c10d::ReduceOp::AVG](Communicator& communicator) mutable {
                 allReduceSparse(communicator, tensor, average);
               });
}

WorkPtr ProcessGroupBagua::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  constexpr const char* kName = "bagua:all_reduce_coalesced";
  TORCH_CHECK_VALUE(!tensors.empty(), checks(kName).where(), ": got no tensors");
  checks(kName).alike(tensors, tensors[0], "tensor");
  reduction::checkSupported(checks(kName), opts.reduceOp, tensors[0].scalar_type());
  Operation all = operation(OpType::ALLREDUCE_COALESCED, kName, tensors[0], opts, opts.reduceOp);
  compareSizesOfAll(all, tensors);
  return executorFor(tensors[0].device())
      ->submit(all, tensors, [tensors, op = opts.reduceOp](Communicator& communicator) {
        Tensors reduced = tensors;
        // What two tensors have in common is reduced as it was before, by either of them.
        const bool isShared = shareBytes(tensors);
        for (auto& tensor : reduced) {
          if (isShared) tensor = tensor.clone();
        }
        for (auto& tensor : reduced) {
          inPlainOrder(tensor, [&](at::Tensor& plain) { communicator.allReduce(plain, op); });
        }
        for (size_t i = 0; isShared && i < tensors.size(); ++i) tensors[i].copy_(reduced[i]);
      });
}

WorkPtr ProcessGroupBagua::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  constexpr const char* kName = "bagua:reduce";
  at::Tensor tensor = checks(kName).single(tensors);
  checks(kName).rank(opts.rootRank, "root");
  reduction::checkSupported(checks(kName), opts.reduceOp, tensor.scalar_type());
  return executorFor(tensor.device())
      ->submit(
          operation(OpType::REDUCE, kName, tensor, opts, opts.reduceOp, opts.rootRank), tensors,
          [tensor, root = static_cast<int>(opts.rootRank), op = opts.reduceOp](Communicator& communicator) mutable {
            inPlainOrder(tensor, [&](at::Tensor& plain) { communicator.reduce(plain, root, op); });
          });
}

WorkPtr ProcessGroupBagua::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  constexpr const char* kName = "bagua:all_gather_into_tensor";
  checks(kName).input(input);
  checks(kName).alike({output}, input, "output");
  checks(kName).rowMajor(output, "output");
  checks(kName).numel(output, input.numel() * size_, "output");
  return executorFor(input.device())
      ->submit(
          operation(OpType::_ALLGATHER_BASE, kName, input, opts, -1, {input}), {output},
          [output, input](Communicator& communicator) mutable { communicator.allGather(output, input.contiguous()); });
}

WorkPtr ProcessGroupBagua::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& opts) {
  constexpr const char* kName = "bagua:all_gather_into_tensor_coalesced";
  TORCH_CHECK_VALUE(!inputs.empty(), checks(kName).where(), ": got no tensors");
  checks(kName).count(outputs.size(), inputs.size(), "outputs");
  for (size_t i = 0; i < inputs.size(); ++i) {
    checks(kName).input(inputs[i]);
    checks(kName).sameDevice(inputs[i], inputs[0], "input");
    checks(kName).alike({outputs[i]}, inputs[i], "output");
    checks(kName).rowMajor(outputs[i], "output");
    checks(kName).numel(outputs[i], inputs[i].numel() * size_, "output");
  }
  Operation all = operation(OpType::COALESCED, kName, inputs[0], opts, -1, inputs);
  compareSizesOfAll(all, inputs);
  return executorFor(inputs[0].device())->submit(all, outputs, [outputs, inputs](Communicator& communicator) mutable {
    for (size_t i = 0; i < inputs.size(); ++i) communicator.allGather(outputs[i], inputs[i].contiguous());
  });
}

WorkPtr ProcessGroupBagua::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& opts) {
  constexpr const char* kName = "bagua:reduce_scatter_tensor";
  checks(kName).tensor(output, "output");
  checks(kName).inputsAlike({input}, output);
  checks(kName).numel(input, output.numel() * size_, "input");
  reduction::checkSupported(checks(kName), opts.reduceOp, input.scalar_type());
  return executorFor(output.device())
      ->submit(operation(OpType::_REDUCE_SCATTER_BASE, kName, output, opts, opts.reduceOp, -1, {input}), {output},
               [output, input, op = opts.reduceOp](Communicator& communicator) mutable {
                 inPlainOrder(output,
                              [&](at::Tensor& plain) { communicator.reduceScatter(plain, input.contiguous(), op); });
               });
}

WorkPtr ProcessGroupBagua::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::ReduceScatterOptions& opts) {
  constexpr const char* kName = "bagua:reduce_scatter_tensor_coalesced";
  TORCH_CHECK_VALUE(!outputs.empty(), checks(kName).where(), ": got no tensors");
  checks(kName).count(inputs.size(), outputs.size(), "inputs");
  for (size_t i = 0; i < outputs.size(); ++i) {
    checks(kName).tensor(outputs[i], "output");
    checks(kName).sameDevice(outputs[i], outputs[0], "output");
    checks(kName).inputsAlike({inputs[i]}, outputs[i]);
    checks(kName).numel(inputs[i], outputs[i].numel() * size_, "input");
    reduction::checkSupported(checks(kName), opts.reduceOp, inputs[i].scalar_type());
  }
  Operation all = operation(OpType::COALESCED, kName, outputs[0], opts, opts.reduceOp, -1, inputs);
  compareSizesOfAll(all, outputs);
  return executorFor(outputs[0].device())
      ->submit(all, outputs, [outputs, inputs, op = opts.reduceOp](Communicator& communicator) mutable {
        for (size_t i = 0; i < inputs.size(); ++i) {
          inPlainOrder(outputs[i],
                       [&](at::Tensor& plain) { communicator.reduceScatter(plain, inputs[i].contiguous(), op); });
        }
      });
}

WorkPtr ProcessGroupBagua::barrier(const c10d::BarrierOptions& opts) {
  Operation barrier{.type = OpType::BARRIER, .name = "bagua:barrier", .timeout = orDefault(opts.timeout)};
  barrier.isAwaited = !opts.asyncOp;
  std::vector<at::Device> used;
  const auto present = current();
  for (const auto& [device, executor] : present->executors()) {
    if (executor->submitted() > 0) used.push_back(device);
  }
  // torch binds each backend of a group to the device, also one that serves the CPU alone.
  const bool mayUseGpus = BAGUA_WITH_CUDA && (present->topology()->hostCount() == 1 || !jobSecurity());
  const at::Device device = barrierDevice({.deviceIds = opts.device_ids,
                                           .bound = mayUseGpus ? getBoundDeviceId() : std::nullopt,
                                           .used = std::move(used),
                                           .hasGpu = !opts.device_ids.empty() && at::hasCUDA()});
  return executorFor(device)->submit(barrier, {}, [](Communicator& communicator) { communicator.barrier(); });
}

void ProcessGroupBagua::monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) {
  Operation barrier{.type = OpType::BARRIER, .name = "bagua:monitored_barrier", .timeout = orDefault(opts.timeout)};
  const auto executor = messageExecutorFor(at::kCPU);
  barrier.sequence = executor->submitted();
  try {
    executor->monitoredBarrier(barrier.timeout, waitAllRanks);
  } catch (...) {
    std::rethrow_exception(withContext(std::current_exception(), barrier, identity()));
  }
}

}  // namespace bagua

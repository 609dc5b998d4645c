// SPDX-License-Identifier: Apache-2.0
// The collectives of ProcessGroupBagua whose input or output is a list with a tensor per rank. They are laid out flat,
// exchanged, and copied to where the user wants them.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "backend/cpu/collectives/reduction.h"
#include "backend/operation/peer_errors.h"
#include "backend/operation/tensor_bytes.h"
#include "backend/process_group/list_sizes.h"
#include "backend/process_group/process_group_bagua.h"

namespace bagua {
namespace {

using c10d::OpType;
using WorkPtr = ProcessGroupBagua::WorkPtr;
using Tensors = std::vector<at::Tensor>;
using Splits = Communicator::Splits;

Splits numels(const Tensors& tensors) {
  Splits counts;
  counts.reserve(tensors.size());
  for (const auto& tensor : tensors) counts.push_back(tensor.numel());
  return counts;
}

// In row-major order, however the tensors are stored.
at::Tensor flatten(const Tensors& tensors) {
  if (tensors.size() == 1) return tensors[0].reshape({-1});
  Tensors flat;
  flat.reserve(tensors.size());
  for (const auto& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  return at::cat(flat);
}

at::Tensor flatSpaceFor(const Tensors& tensors) {
  int64_t total = 0;
  for (const auto& tensor : tensors) total += tensor.numel();
  return at::empty({total}, tensors[0].options().memory_format(std::nullopt));
}

void unflatten(const at::Tensor& flat, const Tensors& tensors) {
  int64_t begin = 0;
  for (const auto& tensor : tensors) {
    tensor.copy_(flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
}

// Elements per rank of a tensor that is split along dimension 0 as c10d describes it.
Splits elementSplits(const std::vector<int64_t>& rows, const at::Tensor& tensor, int size) {
  if (rows.empty()) return Splits(size, tensor.numel() / size);
  const int64_t rowNumel = tensor.dim() == 0 || tensor.size(0) == 0 ? 1 : tensor.numel() / tensor.size(0);
  Splits elements(rows);
  for (auto& count : elements) count *= rowNumel;
  return elements;
}

// Runs `check` of what this rank alone hands in. The others make the call in any case: if `check` throws, they are told
// in the place of `operation`, and stay in step. NCCL tells nobody.
void checkOrRefuse(ExecutorProvider& group, Operation operation, const at::Tensor& like,
                   const std::function<void()>& check) {
  try {
    check();
  } catch (...) {
    operation.isAwaited = false;
    if (like.is_cpu()) {
      const auto options = like.options().layout(at::kStrided);
      group.executorFor(like.device())->submit(operation, {}, [options](Communicator& communicator) {
        at::Tensor nothing = at::empty({0}, options);
        const auto size = static_cast<size_t>(communicator.size());
        communicator.allToAll(nothing, nothing, Splits(size, 0), Splits(size, kRefused));
      });
    }
    throw;
  }
}

// `input` is the root's, empty on the others.
Program scatterProgram(Tensors input, at::Tensor output, int root) {
  return [input = std::move(input), output = std::move(output), root](Communicator& communicator) mutable {
    const bool isRoot = communicator.rank() == root;
    Splits outputSplits(communicator.size(), 0);
    outputSplits[root] = output.numel();
    const Splits inputSplits = isRoot ? numels(input) : Splits(communicator.size(), 0);
    const at::Tensor flat = isRoot ? flatten(input) : at::empty({0}, output.options());
    inPlainOrder(output, [&](at::Tensor& plain) { communicator.allToAll(plain, flat, outputSplits, inputSplits); });
  };
}

// Runs `check` of what a receiver of a scatter hands in. What is sent to it is on its way in any case: if `check`
// throws, it is received and dropped. The others need not know, wherever they are, and all stay in step.
void checkOrDrop(ExecutorProvider& group, Operation operation, const at::Tensor& output,
                 const std::function<void()>& check) {
  try {
    check();
  } catch (...) {
    operation.isAwaited = false;
    if (output.is_cpu() || output.is_cuda()) {
      const at::Tensor dropped = at::empty(output.sizes(), at::dtype(output.dtype()).device(output.device()));
      group.executorFor(output.device())->submit(operation, {}, scatterProgram({}, dropped, operation.peer));
    }
    throw;
  }
}

void gatherUneven(Communicator& communicator, Tensors& outputs, const at::Tensor& input) {
  for (int root = 0; root < communicator.size(); ++root) {
    if (root == communicator.rank()) outputs[root].copy_(input);
    inPlainOrder(outputs[root], [&](at::Tensor& plain) { communicator.broadcast(plain, root); });
  }
}

void gatherToAll(Communicator& communicator, Tensors& outputs, const at::Tensor& input) {
  if (!areEven(outputs)) return gatherUneven(communicator, outputs, input);
  at::Tensor flat = flatSpaceFor(outputs);
  communicator.allGather(flat, input.contiguous());
  unflatten(flat, outputs);
}

}  // namespace

WorkPtr ProcessGroupBagua::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& opts) {
  constexpr const char* kName = "bagua:all_gather";
  at::Tensor input = checks(kName).singleInput(inputs);
  checks(kName).count(outputs.size(), 1, "output list");
  checks(kName).count(outputs[0].size(), size_, "output tensors, one per rank");
  checks(kName).alike(outputs[0], input, "output");
  checks(kName).sameShape(outputs[0][rank_], input, "output of this rank");
  Operation gathering = operation(OpType::ALLGATHER, kName, input, opts, -1, inputs);
  // Inputs may be uneven; what all end up with is the same.
  compareSizes(gathering, outputs[0]);
  return executorFor(input.device())
      ->submit(gathering, outputs[0], [output = outputs[0], input](Communicator& communicator) mutable {
        gatherToAll(communicator, output, input);
      });
}

WorkPtr ProcessGroupBagua::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& opts) {
  constexpr const char* kName = "bagua:all_gather_coalesced";
  TORCH_CHECK_VALUE(!inputs.empty(), checks(kName).where(), ": got no tensors");
  checks(kName).count(outputs.size(), size_, "output lists, one per rank");
  Tensors all;
  for (const auto& list : outputs) {
    checks(kName).count(list.size(), inputs.size(), "tensors in each output list");
    for (size_t i = 0; i < inputs.size(); ++i) {
      checks(kName).input(inputs[i]);
      checks(kName).sameDevice(inputs[i], inputs[0], "input");
      checks(kName).alike({list[i]}, inputs[i], "output");
      checks(kName).sameShape(list[i], inputs[i], "output");
      all.push_back(list[i]);
    }
  }
  Operation gathering = operation(OpType::ALLGATHER_COALESCED, kName, inputs[0], opts, -1, inputs);
  compareSizesOfAll(gathering, inputs);
  return executorFor(inputs[0].device())
      ->submit(gathering, std::move(all), [outputs, inputs](Communicator& communicator) {
        for (size_t i = 0; i < inputs.size(); ++i) {
          Tensors ofInput;
          for (const auto& list : outputs) ofInput.push_back(list[i]);
          gatherToAll(communicator, ofInput, inputs[i]);
        }
      });
}

WorkPtr ProcessGroupBagua::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  constexpr const char* kName = "bagua:gather";
  at::Tensor input = checks(kName).singleInput(inputs);
  checks(kName).rank(opts.rootRank, "root");
  const int root = static_cast<int>(opts.rootRank);
  Operation gathering = operation(OpType::GATHER, kName, input, opts, root, inputs);
  gathering.commonNumel = Operation::kAnyNumel;
  Tensors output;
  checkOrRefuse(*this, gathering, input, [&] {
    if (rank_ != root) return checks(kName).count(outputs.size(), 0, "output list (only the root has one)");
    checks(kName).count(outputs.size(), 1, "output list (only the root has one)");
    output = outputs[0];
    checks(kName).count(output.size(), size_, "output tensors, one per rank");
    checks(kName).alike(output, input, "output");
    checks(kName).sameShape(output[rank_], input, "output of this rank");
  });
  return executorFor(input.device())->submit(gathering, output, [output, input, root](Communicator& communicator) {
    const bool isRoot = communicator.rank() == root;
    Splits inputSplits(communicator.size(), 0);
    inputSplits[root] = input.numel();
    const Splits outputSplits = isRoot ? numels(output) : Splits(communicator.size(), 0);
    at::Tensor flat = isRoot ? flatSpaceFor(output) : at::empty({0}, input.options());
    communicator.allToAll(flat, input.contiguous(), outputSplits, inputSplits);
    if (isRoot) unflatten(flat, output);
  });
}

#if BAGUA_HAS_GATHER_INTO_TENSOR
WorkPtr ProcessGroupBagua::gather_into_tensor(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
  constexpr const char* kName = "bagua:gather_into_tensor";
  std::vector<Tensors> outputs;
  checks(kName).input(input);
  if (rank_ == opts.rootRank) {
    // As the others call it.
    Operation gathering = operation(OpType::GATHER, "bagua:gather", input, opts, opts.rootRank, {input});
    gathering.commonNumel = Operation::kAnyNumel;
    checkOrRefuse(*this, gathering, input, [&] {
      checks(kName).alike({output}, input, "output");
      checks(kName).rowMajor(output, "output");
      checks(kName).numel(output, input.numel() * size_, "output");
    });
    auto& parts = outputs.emplace_back();
    for (int rank = 0; rank < size_; ++rank) {
      parts.push_back(flatOf(output).narrow(0, rank * input.numel(), input.numel()).view(input.sizes()));
    }
  }
  Tensors inputs{input};
  return gather(outputs, inputs, opts);
}
#endif

WorkPtr ProcessGroupBagua::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
  constexpr const char* kName = "bagua:scatter";
  checks(kName).count(outputs.size(), 1, "output");
  TORCH_CHECK_VALUE(outputs[0].defined(), checks(kName).where(), ": output is undefined");
  const at::Tensor& output = outputs[0];
  checks(kName).rank(opts.rootRank, "root");
  const int root = static_cast<int>(opts.rootRank);
  Operation scattering = operation(OpType::SCATTER, kName, output, opts, root);
  scattering.commonNumel = Operation::kAnyNumel;
  Tensors input;
  if (rank_ == root) {
    checkOrRefuse(*this, scattering, output, [&] {
      checks(kName).tensor(output, "output");
      checks(kName).count(inputs.size(), 1, "input list (only the root has one)");
      input = inputs[0];
      checks(kName).count(input.size(), size_, "input tensors, one per rank");
      checks(kName).inputsAlike(input, output);
      checks(kName).sameShape(input[rank_], output, "input of this rank");
    });
  } else {
    checkOrDrop(*this, scattering, output, [&] {
      checks(kName).tensor(output, "output");
      checks(kName).count(inputs.size(), 0, "input list (only the root has one)");
    });
  }
  scattering.inputs = input;
  return executorFor(output.device())->submit(scattering, outputs, scatterProgram(input, output, root));
}

WorkPtr ProcessGroupBagua::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const c10d::ReduceScatterOptions& opts) {
  constexpr const char* kName = "bagua:reduce_scatter";
  at::Tensor output = checks(kName).single(outputs, "output");
  checks(kName).count(inputs.size(), 1, "input list");
  checks(kName).count(inputs[0].size(), size_, "input tensors, one per rank");
  checks(kName).inputsAlike(inputs[0], output);
  checks(kName).sameShape(inputs[0][rank_], output, "input of this rank");
  reduction::checkSupported(checks(kName), opts.reduceOp, output.scalar_type());
  Operation reducing = operation(OpType::REDUCE_SCATTER, kName, output, opts, opts.reduceOp, -1, inputs[0]);
  compareSizes(reducing, inputs[0]);
  return executorFor(output.device())
      ->submit(reducing, outputs, [input = inputs[0], output, op = opts.reduceOp](Communicator& communicator) mutable {
        if (areEven(input)) {
          inPlainOrder(output, [&](at::Tensor& plain) { communicator.reduceScatter(plain, flatten(input), op); });
          return;
        }
        for (int root = 0; root < communicator.size(); ++root) {
          at::Tensor part = input[root].clone(at::MemoryFormat::Contiguous);
          communicator.reduce(part, root, op);
          if (root == communicator.rank()) output.copy_(part);
        }
      });
}

WorkPtr ProcessGroupBagua::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& outputSplits,
                                         std::vector<int64_t>& inputSplits, const c10d::AllToAllOptions& opts) {
  constexpr const char* kName = "bagua:all_to_all_single";
  checks(kName).input(input);
  checks(kName).alike({output}, input, "output");
  checks(kName).rowMajor(output, "output");
  checks(kName).splitSizes(inputSplits, input, "input");
  checks(kName).splitSizes(outputSplits, output, "output");
  Splits sent = elementSplits(inputSplits, input, size_);
  Splits received = elementSplits(outputSplits, output, size_);
  TORCH_CHECK_VALUE(sent[rank_] == received[rank_], checks(kName).where(), ": this rank sends itself ", sent[rank_],
                    " elements of input and expects ", received[rank_], " in output");
  Operation exchange = operation(OpType::ALLTOALL_BASE, kName, input, opts, -1, {input});
  // A rank that gives splits may exchange with one that gives none.
  exchange.commonNumel = Operation::kAnyNumel;
  return executorFor(input.device())
      ->submit(exchange, {output}, [output, input, sent, received](Communicator& communicator) mutable {
        communicator.allToAll(output, input.contiguous(), received, sent);
      });
}

WorkPtr ProcessGroupBagua::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  constexpr const char* kName = "bagua:all_to_all";
  checks(kName).count(inputs.size(), size_, "input tensors, one per rank");
  checks(kName).count(outputs.size(), size_, "output tensors, one per rank");
  checks(kName).inputsAlike(inputs, inputs[0]);
  checks(kName).alike(outputs, inputs[0], "output");
  checks(kName).numel(outputs[rank_], inputs[rank_].numel(), "output of this rank");
  Operation exchange = operation(OpType::ALLTOALL, kName, inputs[0], opts, -1, inputs);
  exchange.commonNumel = Operation::kAnyNumel;
  return executorFor(inputs[0].device())->submit(exchange, outputs, [outputs, inputs](Communicator& communicator) {
    at::Tensor received = flatSpaceFor(outputs);
    communicator.allToAll(received, flatten(inputs), numels(outputs), numels(inputs));
    unflatten(received, outputs);
  });
}

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#include "tests/support/device_program.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "kernels/device_ways.h"

namespace bagua::testing {
namespace {

constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// The memory that the CPU's tensors of a thread have. Kept, so that no other tensor gets the same.
class CpuMemory {
 public:
  static CpuMemory& ofThread() {
    thread_local CpuMemory memory;
    return memory;
  }
  void enter() { ++scopes_; }
  void leave() {
    if (--scopes_ == 0) kept_.clear();
  }
  void add(const at::Tensor& tensor) {
    if (tensor.has_storage()) kept_.push_back(tensor.storage());
  }
  [[nodiscard]] bool has(const at::Tensor& tensor) const {
    return tensor.has_storage() && std::any_of(kept_.begin(), kept_.end(), [&](const c10::Storage& storage) {
             return storage.is_alias_of(tensor.storage());
           });
  }

 private:
  int scopes_ = 0;
  std::vector<c10::Storage> kept_;
};

// That the CPU reads a value for, or whose result has as many elements as values say.
const std::set<std::string>& waiting() {
  static const std::set<std::string> kNames = {"aten::_local_scalar_dense",
                                               "aten::_unique2",
                                               "aten::allclose",
                                               "aten::argwhere",
                                               "aten::bincount",
                                               "aten::equal",

                                               "aten::is_nonzero",
                                               "aten::item",
                                               "aten::masked_select",
                                               "aten::nonzero",
                                               "aten::nonzero_numpy",
                                               "aten::pin_memory",
                                               "aten::repeat_interleave",
                                               "aten::unique_consecutive"};
  return kNames;
}

void collect(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) tensors.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& one : value.toListRef()) collect(one, tensors);
  }
}

std::vector<at::Tensor> tensorsOf(const torch::jit::Stack& stack, size_t begin) {
  std::vector<at::Tensor> tensors;
  for (size_t i = begin; i < stack.size(); ++i) collect(stack[i], tensors);
  return tensors;
}

bool namesDevice(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, size_t begin) {
  const auto place = schema.argumentIndexWithName("device");
  return place && !stack[begin + *place].isNone();
}

bool doesNotBlock(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, size_t begin) {
  const auto place = schema.argumentIndexWithName("non_blocking");
  return place && stack[begin + *place].isBool() && stack[begin + *place].toBool();
}

void check(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, size_t begin,
           const std::vector<at::Tensor>& tensors) {
  const std::string& name = schema.name();
  const auto& host = CpuMemory::ofThread();
  const auto isOfCpu = [&](const at::Tensor& tensor) { return host.has(tensor); };
  const bool areAllOfHost = std::all_of(tensors.begin(), tensors.end(), isOfCpu);
  // What the CPU has made it may read, and carry about.
  if (areAllOfHost && !tensors.empty()) return;
  TORCH_CHECK(!waiting().contains(name), "the CPU would wait for the device: ", name);
  const bool isMove = name == "aten::to" || name == "aten::_to_copy";
  TORCH_CHECK(!isMove || !namesDevice(schema, stack, begin), "a copy between devices: ", name, " names one");
  const bool isCopy = name == "aten::copy_";
  if (isCopy && doesNotBlock(schema, stack, begin)) return;
  for (const auto& tensor : tensors) {
    TORCH_CHECK(!isOfCpu(tensor) || (tensor.dim() == 0 && !isCopy), "tensors of the CPU and of the device meet: ", name,
                ", the CPU's is ", tensor.sizes(), " of ", tensor.scalar_type());
  }
}

void watch(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = operation.schema();
  const size_t begin = stack->size() - schema.arguments().size();
  const auto given = tensorsOf(*stack, begin);
  check(schema, *stack, begin, given);
  auto& host = CpuMemory::ofThread();
  const bool isMade = given.empty() && schema.argumentIndexWithName("device");
  const bool isOfCpu = isMade ? !namesDevice(schema, *stack, begin)
                              : !given.empty() && std::all_of(given.begin(), given.end(),
                                                              [&](const at::Tensor& one) { return host.has(one); });
  {
    // One operation of ours is one of ATen's, whatever it is made of.
    const c10::impl::ExcludeDispatchKeyGuard inside(kKey);
    operation.callBoxed(stack);
  }
  if (!isOfCpu) return;
  for (const auto& made : tensorsOf(*stack, stack->size() - schema.returns().size())) host.add(made);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&watch>());
}

class DeviceCommunicator final : public Communicator {
 public:
  explicit DeviceCommunicator(Communicator& host)
      : Communicator(host.rank(), host.size(), std::make_shared<const HostTopology>(host.topology())), host_(host) {}

  void broadcast(at::Tensor& tensor, int root) override {
    call({tensor}, [&] { host_.broadcast(tensor, root); });
  }
  void allReduce(at::Tensor& tensor, const ReduceOp& op) override {
    call({tensor}, [&] { host_.allReduce(tensor, op); });
  }
  void reduce(at::Tensor& tensor, int root, const ReduceOp& op) override {
    call({tensor}, [&] { host_.reduce(tensor, root, op); });
  }
  void allGather(at::Tensor& output, const at::Tensor& input) override {
    call({output, input}, [&] { host_.allGather(output, input); });
  }
  void reduceScatter(at::Tensor& output, const at::Tensor& input, const ReduceOp& op) override {
    call({output, input}, [&] { host_.reduceScatter(output, input, op); });
  }
  void allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                const Splits& inputSplits) override {
    call({output, input}, [&] { host_.allToAll(output, input, outputSplits, inputSplits); });
  }
  void barrier() override {
    call({}, [&] { host_.barrier(); });
  }

 private:
  template <typename Call>
  void call(const std::vector<at::Tensor>& tensors, const Call& body) {
    for (const auto& tensor : tensors) {
      TORCH_CHECK(!CpuMemory::ofThread().has(tensor), "rank ", rank(), " would give NCCL a tensor of the CPU");
    }
    const c10::impl::ExcludeDispatchKeyGuard outside(kKey);
    body();
  }

  Communicator& host_;
};

}  // namespace

OnlyEnqueues::OnlyEnqueues() : watched_(kKey) { CpuMemory::ofThread().enter(); }
OnlyEnqueues::~OnlyEnqueues() { CpuMemory::ofThread().leave(); }

void runProgram(at::Device device, Communicator& communicator, const std::function<void(Communicator&)>& program) {
  if (worksOnCpu(device)) return program(communicator);
  const OnlyEnqueues watched;
  DeviceCommunicator onDevice(communicator);
  program(onDevice);
}

}  // namespace bagua::testing

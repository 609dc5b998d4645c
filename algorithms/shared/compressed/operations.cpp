// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/operations.h"

#include <c10/util/Exception.h>

#include "algorithms/shared/compressed/collectives.h"
#include "backend/operation/tensor_bytes.h"
#include "backend/process_group/argument_checks.h"

namespace bagua::compressed {
namespace {

// What the three have in common: one lane, in which every rank is a host of its own.
class Call {
 public:
  Call(ExecutorProvider& group, c10d::OpType type, const char* name, const CallOptions& options)
      : group_(group), checks_(name, group.identity()), options_(options), info_(CodecRegistry::find(options.codec)) {
    operation_.type = type;
    operation_.name = name;
    operation_.timeout = group.timeout();
    operation_.isAwaited = options.isAwaited;
    coding_.codec = info_.codec;
    operation_.configuration = std::make_shared<const std::string>(options.codec);
  }

  void isReduction() { operation_.reduceOp = options_.average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM; }
  void check(const at::Tensor& tensor, const char* role) const {
    checks_.tensor(tensor, role);
    checks_.rowMajor(tensor, role);
    const auto dtype = tensor.scalar_type();
    TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
                     checks_.where(), ": ", role, " must be float32, float64, float16 or bfloat16 to be coded, got ",
                     dtype);
    info_.checkDevice(tensor.device(), checks_.where());
  }

  // And one that holds a part of the size of `part` for every rank.
  void checkWhole(const at::Tensor& whole, const char* role, const at::Tensor& part, const char* partRole) const {
    check(part, partRole);
    checks_.alike({whole}, part, role);
    check(whole, role);
    checks_.numel(whole, part.numel() * group_.identity().size, role);
  }

  // Calls body(lanes, divisor, coding, seconds, communicator) as a program. `common` has the same size on all ranks,
  // `numel` are the elements of all lanes.
  template <typename Body>
  c10::intrusive_ptr<c10d::Work> submit(const at::Tensor& common, int64_t numel, std::vector<at::Tensor> inputs,
                                        const at::Tensor& result, Body body) {
    operation_.dtype = common.scalar_type();
    operation_.numel = common.numel();
    operation_.inputs = std::move(inputs);
    auto program = [numel, isOnCpu = common.is_cpu(), average = options_.average, coding = coding_,
                    body = std::move(body)](Communicator& communicator) mutable {
      // A rank whose call has elements is found out.
      if (numel == 0 && isOnCpu) return communicator.barrier();
      const auto everyRank = HostTopology::oneRankPerHost(communicator.size());
      const HostLanes lanes(everyRank, communicator.rank(), numel);
      StageSeconds seconds;
      body(lanes, average ? communicator.size() : 1, coding, seconds, communicator);
    };
    return group_.executorFor(common.device())->submit(operation_, {result}, std::move(program));
  }

 private:
  ExecutorProvider& group_;
  const ArgumentChecks checks_;
  const CallOptions options_;
  const CodecInfo& info_;
  Coding coding_;
  Operation operation_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> submitAllReduce(ExecutorProvider& group, const at::Tensor& tensor,
                                               const CallOptions& options) {
  Call call(group, c10d::OpType::ALLREDUCE, "bagua:compressed_all_reduce", options);
  call.check(tensor, "tensor");
  call.isReduction();
  return call.submit(tensor, tensor.numel(), {}, tensor,
                     [flat = flatOf(tensor)](const HostLanes& lanes, double divisor, const Coding& coding,
                                             StageSeconds& seconds, Communicator& communicator) mutable {
                       allReduce(flat, lanes, divisor, coding, seconds, communicator);
                     });
}

c10::intrusive_ptr<c10d::Work> submitReduceScatter(ExecutorProvider& group, const at::Tensor& output,
                                                   const at::Tensor& input, const CallOptions& options) {
  Call call(group, c10d::OpType::_REDUCE_SCATTER_BASE, "bagua:compressed_reduce_scatter", options);
  call.checkWhole(input, "input", output, "output");
  call.isReduction();
  return call.submit(
      output, input.numel(), {input}, output,
      [own = flatOf(output), flat = flatOf(input)](const HostLanes& lanes, double divisor, const Coding& coding,
                                                   StageSeconds& seconds, Communicator& communicator) mutable {
        reduceScatter(flat, own, lanes, divisor, coding, seconds, communicator);
      });
}

c10::intrusive_ptr<c10d::Work> submitAllGather(ExecutorProvider& group, const at::Tensor& output,
                                               const at::Tensor& input, const CallOptions& options) {
  Call call(group, c10d::OpType::_ALLGATHER_BASE, "bagua:compressed_all_gather", options);
  call.checkWhole(output, "output", input, "input");
  return call.submit(
      input, output.numel(), {input}, output,
      [flat = flatOf(output), own = flatOf(input)](const HostLanes& lanes, double /*divisor*/, const Coding& coding,
                                                   StageSeconds& seconds, Communicator& communicator) mutable {
        allGather(flat, own, lanes, coding, seconds, communicator);
      });
}

}  // namespace bagua::compressed

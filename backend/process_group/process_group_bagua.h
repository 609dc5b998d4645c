// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "backend/health/group_health.h"
#include "backend/message_executor.h"
#include "backend/os/process_mark.h"
#include "backend/process_group/argument_checks.h"
#include "backend/rendezvous/rank_record.h"
#include "backend/torch_compat.h"

namespace bagua {

inline constexpr const char* kBackendName = "bagua";

// The c10d backend "bagua": one object for CPU and CUDA tensors. It checks arguments, makes each operation a program,
// and hands it to the executor of the tensors' device. Safe to call from several threads; the order of calls has to be
// the same on every rank, as for any c10d backend. In a forked child it refuses operations, and everything else leaves
// the parent's group alone.
class ProcessGroupBagua final : public c10d::Backend, public ExecutorProvider {
 public:
  struct Options final : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
        : c10d::Backend::Options(kBackendName, timeout) {}
    Options(const Options&) = default;

    // CUDA: run communication on a stream of high priority.
    bool highPriorityStream = false;
    // CPU: programs never run together, as makeCpuExecutor has it. Ours, for groups of our own.
    bool isSerial = false;
  };

  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Collective: returns when all `size` ranks have met in `store`.
  ProcessGroupBagua(StorePtr store, int rank, int size, c10::intrusive_ptr<Options> options);
  ~ProcessGroupBagua() override;

  const std::string getBackendName() const override { return kBackendName; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  // Collectives started so far.
  uint64_t getSequenceNumberForGroup() override;
  void setGroupUid(const std::string& name) override;

  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::GatherOptions& opts) override;
#if BAGUA_HAS_GATHER_INTO_TENSOR
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) override;
#endif
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& outputSplits,
                        std::vector<int64_t>& inputSplits, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const c10d::AllToAllOptions& opts) override;
  WorkPtr send(std::vector<at::Tensor>& tensors, int destination, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int source, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) override;

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  bool supportsSplitting() const override { return true; }
  // `ranks` are ranks of this group. Returns nullptr on a rank that is not among them.
  c10::intrusive_ptr<c10d::Backend> split(const StorePtr& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> merge(const StorePtr& store, const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                          const int& rank, const int& size) override;
  void eagerConnectSingleDevice(at::Device device) override;

  c10d::ErrorType getError() override;
  // Fails everything in flight; the group is unusable afterwards. Callable from any thread.
  void abort() override;
  void shutdown() override;

  MessageExecutor& executorFor(at::Device device) override;
  [[nodiscard]] const GroupIdentity& identity() const override { return identity_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return options_->timeout; }
  [[nodiscard]] const HostTopology& topology() const override { return *topology_; }

 private:
  // What all options of c10d's collectives have in common.
  struct CallOptions {
    template <typename Options>
    CallOptions(const Options& options)  // NOLINT(google-explicit-constructor): any of c10d's serves
        : timeout(options.timeout), isAwaited(!options.asyncOp) {}
    CallOptions(std::chrono::milliseconds limit)  // NOLINT(google-explicit-constructor): messages have only this
        : timeout(limit), isAwaited(false) {}
    std::chrono::milliseconds timeout;
    bool isAwaited;
  };
  // An operation of ours under construction. A negative timeout is the group's.
  Operation operation(c10d::OpType type, const char* name, const at::Tensor& like, const CallOptions& options,
                      int64_t peer = -1, std::vector<at::Tensor> inputs = {}) const;
  // The same for one that reduces.
  Operation operation(c10d::OpType type, const char* name, const at::Tensor& like, const CallOptions& options,
                      const c10d::ReduceOp& reduceOp, int64_t peer = -1, std::vector<at::Tensor> inputs = {}) const;
  [[nodiscard]] std::chrono::milliseconds orDefault(std::chrono::milliseconds timeout) const;
  [[nodiscard]] ArgumentChecks checks(const char* operation) const { return {operation, identity_}; }
  using Executors =
      std::map<at::Device, std::shared_ptr<MessageExecutor>, bool (*)(const at::Device&, const at::Device&)>;
  // A copy: they are called without the mutex.
  Executors executors() const;
  std::shared_ptr<MessageExecutor> makeExecutor(at::Device device);
  void close(const std::string& reason);
  void stopHealth();
  c10::intrusive_ptr<Options> optionsOf(const c10::intrusive_ptr<c10d::Backend::Options>& opts) const;

  const ProcessMark mark_;
  const StorePtr store_;
  const c10::intrusive_ptr<Options> options_;
  const GroupMembers members_;
  const std::shared_ptr<const HostTopology> topology_;
  GroupIdentity identity_;

  mutable std::mutex mutex_;
  // Made with the first executor; outlives them all.
  std::unique_ptr<GroupHealth> health_;
  Executors executors_;
  // Why no operation is accepted any more; empty while the group is open.
  std::string closed_;
  bool coalescing_ = false;
  std::optional<at::Device> coalescedDevice_;
};

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <set>

#include "backend/message_executor.h"
#include "backend/os/process_mark.h"
#include "backend/process_group/argument_checks.h"
#include "backend/process_group/change_attempt.h"
#include "backend/process_group/group_epoch.h"
#include "backend/process_group/group_options.h"
#include "backend/torch_compat.h"

namespace bagua {

// The c10d backend "bagua": one object for CPU and CUDA tensors. It checks arguments, makes each operation a program,
// and hands it to the executor of the tensors' device. Its ranks may change in the life of the object (reconfigure()):
// what belongs to one set of them is a GroupEpoch. Safe to call from several threads; the order of calls has to be the
// same on every rank, as for any c10d backend. In a forked child it refuses operations, and everything else leaves the
// parent's group alone.
class ProcessGroupBagua final : public c10d::Backend, public ExecutorProvider {
 public:
  using Options = GroupOptions;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Collective: returns when all `size` ranks have met in `store`. With waitsForReconfigure it returns at once.
  ProcessGroupBagua(StorePtr store, int rank, int size, c10::intrusive_ptr<Options> options);
  ~ProcessGroupBagua() override;

  const std::string getBackendName() const override { return kBackendName; }
  // Returns a copy: torch writes the name and the timeout of a child into it.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(*options_);
  }
  // Returns the group's own, of which a change counts from the next operation on.
  [[nodiscard]] c10::intrusive_ptr<Options> liveOptions() const { return options_; }
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

  bool supportsShrinking() const override { return true; }
  // The ranks of a new group meet: `rank` of `size` gets a part of the store that no other attempt has used.
  using MeetAfresh =
      std::function<StorePtr(const StorePtr& store, int rank, int size, std::chrono::milliseconds timeout)>;
  // Sets how groups meet that are made of another one, as the package does when it is loaded; before, they take the
  // store as it is.
  static void useMeeting(MeetAfresh meetAfresh);
  // A new group of the ranks that are not in `excluded`, which alone call this. They meet in the store of this one, and
  // may have to call again, where one of them did not come.
  c10::intrusive_ptr<c10d::Backend> shrinkTo(const std::vector<int64_t>& excluded, int flags,
                                             const c10::intrusive_ptr<c10d::Backend::Options>& opts);

#if BAGUA_HAS_RECONFIGURE
  bool supportsReconfigure() const override { return true; }
  // Stays the same for the life of the object: see MemberHandle.
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  // Collective over those whose handles are given: returns when all of them have met at the first one's store, with no
  // regard of earlier members or of what became of their operations, which fail. Throws ValueError for handles that
  // make no group, RuntimeError for a uuid that was used before, DistBackendError where a member does not come in time,
  // or abort() or shutdown() are called meanwhile; then this group is what it was.
  WorkPtr reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif

  // Where the members since the last reconfigure() have met; null before the first one.
  [[nodiscard]] StorePtr reconfiguredStore() const;

  // COMM_ERROR where an operation has failed since the last reconfigure(); an abort() is no failure.
  c10d::ErrorType getError() override;
  // Fails everything in flight, a reconfigure() that waits for members, too; the group is unusable until it is
  // reconfigured. Callable from any thread.
  void abort() override;
  void shutdown() override;

  std::shared_ptr<Executor> executorFor(at::Device device) override { return messageExecutorFor(device); }
  [[nodiscard]] GroupIdentity identity() const override;
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return options_->timeout; }
  [[nodiscard]] uint64_t epoch() const override;
  [[nodiscard]] std::shared_ptr<const HostTopology> topology() const override { return current()->topology(); }

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
  [[nodiscard]] ArgumentChecks checks(const char* operation) const { return {operation, identity()}; }
  std::shared_ptr<MessageExecutor> messageExecutorFor(at::Device device);
  // Called where a message is refused: see GroupEpoch.
  void dropCoalescing();
  // Throws DistBackendError in a forked child.
  void checkIsOwn() const;
  // The same, and where there is no epoch yet.
  [[nodiscard]] std::shared_ptr<GroupEpoch> current() const;
  [[nodiscard]] std::shared_ptr<GroupEpoch> currentOrNull() const;
  // Of a reconfigure() that waits.
  void endAttempt(const char* how);
  c10::intrusive_ptr<Options> optionsOf(const c10::intrusive_ptr<c10d::Backend::Options>& opts) const;
  // Returns what the whole job calls these ranks of the group, which has no list where it is of all ranks.
  [[nodiscard]] std::vector<uint64_t> globalRanks(const std::vector<int>& ranks) const;
  // Its ranks meet below that name. The store may outlive them, as where torchrun starts ranks again.
  static c10::intrusive_ptr<c10d::Backend> newGroup(const std::string& name, const StorePtr& store, int rank, int size,
                                                    const c10::intrusive_ptr<Options>& options);

  const ProcessMark mark_;
  const c10::intrusive_ptr<Options> options_;

  mutable std::mutex mutex_;
  // Null before the first reconfigure() of a group that waits for it.
  std::shared_ptr<GroupEpoch> current_;
  bool isShutDown_ = false;
  bool isReconfigured_ = false;
  // Of the reconfigure() that waits for other members; else that of an earlier one, or null.
  std::shared_ptr<ChangeAttempt> attempt_;

  // One call of reconfigure() at a time.
  std::mutex reconfiguring_;
  std::set<int64_t> usedUuids_;
  // Guards the handle, which is drawn when it is first asked for.
  mutable std::mutex handleMutex_;
  mutable std::string handle_;
};

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/profiler_handover.h"

#include <torch/csrc/profiler/orchestration/observer.h>

namespace bagua {

ProfilerHandover ProfilerHandover::ofThisThread() {
  ProfilerHandover handover;
  if (!torch::profiler::impl::profilerEnabled()) return handover;
  handover.callbacks_ = at::get_record_function_tls_();
  handover.info_ = c10::ThreadLocalDebugInfo::current();
  return handover;
}

ProfilerHandover::Scope::Scope(const ProfilerHandover& handover) : isActive_(handover.info_ != nullptr) {
  if (!isActive_) return;
  callbacks_ = at::get_record_function_tls_();
  info_ = c10::ThreadLocalDebugInfo::current();
  at::set_record_function_tls_(handover.callbacks_);
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(handover.info_);
}

ProfilerHandover::Scope::~Scope() {
  if (!isActive_) return;
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(info_);
  at::set_record_function_tls_(callbacks_);
}

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#include "backend/health/operation_log.h"

#include "backend/health/health_thread.h"

namespace bagua {

void OperationLog::onFailure(Abort abort) { health_->onFailure(index_, std::move(abort)); }

OperationLog::Token OperationLog::begin(const Operation& operation, const ProgramFingerprint& program, Kind kind) {
  RunningOperation running;
  running.program = program;
  running.kind = kind;
  running.begun = std::chrono::steady_clock::now();
  running.timeout = operation.timeout;
  return health_->begin(index_, running, operation);
}

void OperationLog::end(Token token, bool isSuccess) { health_->end(index_, token, isSuccess); }

std::exception_ptr OperationLog::explain(const std::exception_ptr& error, const Operation& operation) {
  return health_->explain(error, operation);
}

void OperationLog::reportAbort(const std::string& reason) { health_->reportAbort(reason); }

std::chrono::milliseconds OperationLog::patience(std::chrono::milliseconds timeout) const {
  return health_->patience(timeout);
}

}  // namespace bagua

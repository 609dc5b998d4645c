// SPDX-License-Identifier: Apache-2.0
#include "backend/operation/operation.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "backend/operation/backend_error.h"
#include "backend/operation/peer_errors.h"
#include "backend/operation/program_fingerprint.h"

namespace bagua {

Operation withoutInputs(Operation operation) {
  operation.inputs.clear();
  return operation;
}

std::string describe(const Operation& operation, const GroupIdentity& group) {
  return c10::str(describe(fingerprintOf(operation)), " on rank ", group.rank, " of ", group.size, ", group '",
                  group.name, "'");
}

std::string messageOf(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
}

bool isSymptom(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerDiedError&) {
    return false;
  } catch (const MismatchError&) {
    return false;
  } catch (const c10::DistError&) {
    return true;
  } catch (const c10::Error&) {
    return false;
  } catch (...) {
    // Transports below c10d throw std::runtime_error when a connection ends.
    return true;
  }
}

bool isDeath(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerDiedError&) {
    return true;
  } catch (...) {
    return false;
  }
}

std::exception_ptr withContext(const std::exception_ptr& cause, const Operation& operation,
                               const GroupIdentity& group) {
  const std::string message = messageOf(cause);
  const std::string context = describe(operation, group) + " failed: ";
  const bool hasContext = message.compare(0, context.size(), context) == 0;
  return makeBackendError(hasContext ? message : context + message);
}

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#include "backend/operation.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <sstream>

namespace bagua {

Operation withoutInputs(Operation operation) {
  operation.inputs.clear();
  return operation;
}

std::string describe(const Operation& operation, const GroupIdentity& group) {
  std::ostringstream text;
  text << operation.name << " #" << operation.sequence;
  if (operation.dtype != at::ScalarType::Undefined) {
    text << " (" << at::toString(operation.dtype) << "[" << operation.numel << "]";
    if (operation.peer >= 0) text << ", peer rank " << operation.peer;
    text << ")";
  }
  text << " on rank " << group.rank << " of " << group.size << ", group '" << group.name << "'";
  return text.str();
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

std::exception_ptr withContext(const std::exception_ptr& cause, const Operation& operation,
                               const GroupIdentity& group) {
  return std::make_exception_ptr(
      C10_BUILD_ERROR(DistBackendError, c10::str(describe(operation, group), " failed: ", messageOf(cause))));
}

}  // namespace bagua

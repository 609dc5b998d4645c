// SPDX-License-Identifier: Apache-2.0
#include "tests/support/immediate_steps.h"

#include "backend/process_group/work_bagua.h"
#include "tests/support/device_program.h"

namespace bagua::testing {

c10::intrusive_ptr<c10d::Work> ImmediateSteps::submit(const char* name, const std::vector<at::Tensor>& tensors,
                                                      Wait /*wait*/, Task task) {
  StageSeconds seconds;
  runProgram(tensors.front().device(), communicator_, [&](Communicator& communicator) { task(communicator, seconds); });
  auto work = c10::make_intrusive<WorkBagua>(rank(), Operation{.name = name}, tensors);
  static_cast<void>(work->complete());
  return work;
}

}  // namespace bagua::testing

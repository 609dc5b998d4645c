// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "backend/executor.h"

namespace bagua {

// What has to be the same on all ranks, as text.
struct Facts {
  // The algorithm and its options; empty on a rank that has found them wrong and is about to say so.
  std::string algorithm;
  // Shapes and dtypes of the model's parameters.
  std::string parameters;
};

// Collective. Throws ValueError on every rank unless all come with the same facts. Returns who shares a host.
HostTopology agreeOn(const Facts& own, ExecutorProvider& executors, at::Device device);

}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "backend/executor.h"

namespace bagua {

// What a rank is about to register.
struct Registration {
  // The algorithm and its options; empty if this rank has found them wrong and is about to say so.
  std::string algorithm;
  // Shapes and dtypes of the model's parameters.
  std::string parameters;
};

// Collective. Throws ValueError on every rank unless all are about to register the same on models alike. Returns who
// shares a host.
HostTopology agreeOn(const Registration& own, ExecutorProvider& executors, at::Device device);

}  // namespace bagua

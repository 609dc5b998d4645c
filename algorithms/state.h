// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace bagua {

// Named tensors: what a checkpoint of one rank keeps of an algorithm.
using AlgorithmState = std::map<std::string, at::Tensor>;

// A number in a state, and back. counterOf throws ValueError where the state lacks it or holds no number from 0 on.
at::Tensor counterTensor(int64_t value);
int64_t counterOf(const AlgorithmState& state, const std::string& name);
// Throws ValueError where the state lacks it, or holds another number of elements or dtype than `like`.
at::Tensor tensorOf(const AlgorithmState& state, const std::string& name, const at::Tensor& like);
// Throws ValueError where the state holds what load() does not take: it would be lost without a word.
void checkThatAllAreTaken(const AlgorithmState& state, const std::function<bool(const std::string& name)>& isTaken);

}  // namespace bagua

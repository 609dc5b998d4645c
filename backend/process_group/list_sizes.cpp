// SPDX-License-Identifier: Apache-2.0
#include "backend/process_group/list_sizes.h"

#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <string>

#include "backend/operation/hash.h"
#include "backend/operation/program_fingerprint.h"

namespace bagua {
namespace {

using Tensors = std::vector<at::Tensor>;

// Never negative: these values of Operation::commonNumel have a meaning of their own. It is 0 where no tensor has
// elements, as that of one tensor is.
int64_t hashOfSizes(const Tensors& tensors) {
  if (std::ranges::all_of(tensors, [](const at::Tensor& tensor) { return tensor.numel() == 0; })) return 0;
  uint64_t hash = kHashSeed;
  for (const auto& tensor : tensors) {
    hash = mix(hash, static_cast<uint64_t>(tensor.numel()));
    // The operation names the dtype of the first one.
    hash = mix(hash, static_cast<uint64_t>(tensor.scalar_type()));
    // The upper bits come down, so that sizes cannot make up for each other.
    hash ^= hash >> 32U;
  }
  return static_cast<int64_t>(hash >> 1U);
}

bool areOfOneDtype(const Tensors& tensors) {
  return std::ranges::all_of(
      tensors, [&](const at::Tensor& tensor) { return tensor.scalar_type() == tensors[0].scalar_type(); });
}

// "3 x 100" or "3 sizes: 5, 7, 1", of several dtypes "2 sizes: 5 Float, 7 Double". Of a long list the first ones and a
// hash of all: "40 sizes: 5, 7, ... #1a2b3c4d".
std::string textOfSizes(const Tensors& tensors) {
  constexpr size_t kMost = sizeof(ProgramFingerprint::configuration) - 1;
  constexpr size_t kEnding = 14;
  const std::string count = std::to_string(tensors.size());
  const bool namesDtypes = !areOfOneDtype(tensors);
  if (areEven(tensors) && !namesDtypes) return count + " x " + std::to_string(tensors[0].numel());
  std::string text = count + " sizes: ";
  std::string shown;
  for (size_t i = 0; i < tensors.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(tensors[i].numel());
    if (namesDtypes) text += c10::str(" ", tensors[i].scalar_type());
    if (text.size() + kEnding <= kMost) shown = text;
  }
  if (text.size() <= kMost) return text;
  std::ostringstream hash;
  hash << ", ... #" << std::hex << std::setw(8) << std::setfill('0') << static_cast<uint32_t>(hashOfSizes(tensors));
  return shown + hash.str();
}

}  // namespace

bool areEven(const Tensors& tensors) {
  return std::ranges::all_of(tensors, [&](const at::Tensor& tensor) { return tensor.numel() == tensors[0].numel(); });
}

void compareSizes(Operation& operation, const Tensors& tensors) {
  operation.commonNumel = hashOfSizes(tensors);
  // Even ones are told by the number of elements.
  if (!areEven(tensors)) operation.configuration = std::make_shared<const std::string>(textOfSizes(tensors));
}

void compareSizesOfAll(Operation& operation, const Tensors& tensors) {
  operation.numel = 0;
  for (const auto& tensor : tensors) operation.numel += tensor.numel();
  operation.commonNumel = hashOfSizes(tensors);
  operation.configuration = std::make_shared<const std::string>(textOfSizes(tensors));
}

}  // namespace bagua

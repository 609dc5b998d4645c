// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/premul_sum.h"

#include <c10/util/Exception.h>

#include <cstring>

namespace bagua {
namespace {

at::ScalarType torchDtype(ncclDataType_t dtype) {
  switch (dtype) {
    case ncclFloat16:
      return at::kHalf;
    case ncclBfloat16:
      return at::kBFloat16;
    case ncclFloat32:
      return at::kFloat;
    default:
      return at::kDouble;
  }
}

template <typename T>
void store(double value, std::array<std::byte, sizeof(double)>& memory) {
  static_assert(sizeof(T) <= sizeof(double));
  const T converted = static_cast<T>(value);
  std::memcpy(memory.data(), &converted, sizeof(T));
}

void storeAs(ncclDataType_t dtype, double value, std::array<std::byte, sizeof(double)>& memory) {
  switch (dtype) {
    case ncclFloat16:
      return store<at::Half>(value, memory);
    case ncclBfloat16:
      return store<at::BFloat16>(value, memory);
    case ncclFloat32:
      return store<float>(value, memory);
    default:
      return store<double>(value, memory);
  }
}

}  // namespace

PreMulFactor::PreMulFactor(const c10d::ReduceOp& op, ncclDataType_t dtype, at::Device device) {
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr, "ReduceOp.PREMUL_SUM came without its factor");
  const at::Tensor& given = supplement->tensor_factor;
  if (!given.defined()) {
    storeAs(dtype, supplement->double_factor, onHost_);
  } else if (given.device() == device && device.is_cuda()) {
    onDevice_ = given.to(torchDtype(dtype));
  } else {
    // From elsewhere it is fetched, which waits for it.
    storeAs(dtype, given.item<double>(), onHost_);
  }
}

void* PreMulFactor::data() { return onDevice_.defined() ? onDevice_.data_ptr() : onHost_.data(); }

ncclScalarResidence_t PreMulFactor::residence() const {
  return onDevice_.defined() ? ncclScalarDevice : ncclScalarHostImmediate;
}

}  // namespace bagua

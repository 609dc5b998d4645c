// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/nccl_types.h"

#include <c10/util/Exception.h>

#include <optional>

#include "backend/operation/reduction_names.h"

namespace bagua {
namespace {

using c10d::ReduceOp;

// Nothing for dtypes that NCCL cannot add (16-bit integers, quantised ones). Bools are bytes of 0 and 1.
std::optional<ncclDataType_t> realDtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
    case at::kByte:
      return ncclUint8;
    case at::kChar:
      return ncclInt8;
    case at::kInt:
      return ncclInt32;
    case at::kUInt32:
      return ncclUint32;
    case at::kLong:
      return ncclInt64;
    case at::kUInt64:
      return ncclUint64;
    case at::kHalf:
      return ncclFloat16;
    case at::kFloat:
      return ncclFloat32;
    case at::kDouble:
      return ncclFloat64;
    case at::kBFloat16:
      return ncclBfloat16;
    default:
      return std::nullopt;
  }
}

bool takesFactor(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble;
}

ncclRedOp_t opFor(ReduceOp::RedOpType op, at::ScalarType dtype) {
  const bool isBool = dtype == at::kBool;
  switch (op) {
    case ReduceOp::SUM:
      return isBool ? ncclMax : ncclSum;  // "or": a sum of bytes could wrap to 0
    case ReduceOp::PRODUCT:
      return isBool ? ncclMin : ncclProd;  // "and"
    case ReduceOp::MIN:
      return ncclMin;
    case ReduceOp::MAX:
      return ncclMax;
    case ReduceOp::AVG:
      TORCH_CHECK_TYPE(!isBool, "Cannot use ReduceOp.AVG with NCCL on tensors of dtype Bool");
      return ncclAvg;  // integers: the quotient of the sum, truncated
    default:
      TORCH_CHECK_VALUE(false, "Cannot use ReduceOp.", reductionName(op),
                        " with NCCL (CUDA tensors): it has SUM, PRODUCT, MIN, MAX, AVG and PREMUL_SUM");
  }
}

}  // namespace

NcclReduction ncclReductionFor(const ReduceOp& op, at::ScalarType dtype) {
  const ReduceOp::RedOpType kind = op;
  const bool isComplex = at::isComplexType(dtype);
  const bool isLinear = kind == ReduceOp::SUM || kind == ReduceOp::AVG || kind == ReduceOp::PREMUL_SUM;
  TORCH_CHECK_VALUE(!isComplex || isLinear, "Cannot use ReduceOp.", reductionName(kind),
                    " with NCCL on complex tensors (dtype ", at::toString(dtype), "): only SUM, AVG and PREMUL_SUM");
  const at::ScalarType real = isComplex ? at::toRealValueType(dtype) : dtype;
  const auto ncclDtype = realDtype(real);
  TORCH_CHECK_TYPE(ncclDtype.has_value(), "NCCL cannot reduce tensors of dtype ", at::toString(dtype), " (",
                   reductionName(kind), "); calls that only move data take every dtype");
  NcclReduction reduction{.dtype = *ncclDtype, .valuesPerElement = isComplex ? 2 : 1};
  if (kind == ReduceOp::PREMUL_SUM) {
    TORCH_CHECK_TYPE(takesFactor(real), "Cannot use ReduceOp.PREMUL_SUM with NCCL on tensors of dtype ",
                     at::toString(dtype), ": it takes Half, BFloat16, Float and Double");
    reduction.isPreMulSum = true;
  } else {
    reduction.op = opFor(kind, dtype);
  }
  return reduction;
}

}  // namespace bagua

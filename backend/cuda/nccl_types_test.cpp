// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/nccl_types.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/cuda/nccl_api_mock.h"
#include "tests/support/thrown_messages.h"

namespace bagua {
namespace {

using c10d::ReduceOp;
using ::testing::HasSubstr;
using testing::messageThrownBy;
using testing::preMulSum;

TEST(NcclTypesTest, RealDtypesMapToNcclsOwn) {
  const std::vector<std::pair<at::ScalarType, ncclDataType_t>> expected = {
      {at::kByte, ncclUint8},     {at::kChar, ncclInt8},        {at::kInt, ncclInt32},    {at::kUInt32, ncclUint32},
      {at::kLong, ncclInt64},     {at::kUInt64, ncclUint64},    {at::kHalf, ncclFloat16}, {at::kFloat, ncclFloat32},
      {at::kDouble, ncclFloat64}, {at::kBFloat16, ncclBfloat16}};
  for (const auto& [dtype, ncclDtype] : expected) {
    const auto reduction = ncclReductionFor(ReduceOp::SUM, dtype);
    EXPECT_EQ(reduction.dtype, ncclDtype) << dtype;
    EXPECT_EQ(reduction.valuesPerElement, 1) << dtype;
    EXPECT_EQ(reduction.op, ncclSum) << dtype;
  }
}

TEST(NcclTypesTest, OperationsMapToNcclsOwn) {
  EXPECT_EQ(ncclReductionFor(ReduceOp::PRODUCT, at::kInt).op, ncclProd);
  EXPECT_EQ(ncclReductionFor(ReduceOp::MIN, at::kFloat).op, ncclMin);
  EXPECT_EQ(ncclReductionFor(ReduceOp::MAX, at::kFloat).op, ncclMax);
  EXPECT_EQ(ncclReductionFor(ReduceOp::AVG, at::kLong).op, ncclAvg);
}

TEST(NcclTypesTest, BoolsAreOredAndAnded) {
  EXPECT_EQ(ncclReductionFor(ReduceOp::SUM, at::kBool).op, ncclMax);
  EXPECT_EQ(ncclReductionFor(ReduceOp::PRODUCT, at::kBool).op, ncclMin);
  EXPECT_EQ(ncclReductionFor(ReduceOp::SUM, at::kBool).dtype, ncclUint8);
  EXPECT_THROW(ncclReductionFor(ReduceOp::AVG, at::kBool), c10::TypeError);
}

TEST(NcclTypesTest, ComplexNumbersArePairsOfReals) {
  const auto reduction = ncclReductionFor(ReduceOp::AVG, at::kComplexDouble);
  EXPECT_EQ(reduction.dtype, ncclFloat64);
  EXPECT_EQ(reduction.valuesPerElement, 2);
  EXPECT_EQ(reduction.op, ncclAvg);
  for (const auto op : {ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX}) {
    EXPECT_THROW(ncclReductionFor(op, at::kComplexFloat), c10::ValueError);
  }
}

TEST(NcclTypesTest, WhatNcclCannotDoIsNamed) {
  EXPECT_THAT(messageThrownBy([] { ncclReductionFor(ReduceOp::BXOR, at::kInt); }),
              HasSubstr("Cannot use ReduceOp.BXOR with NCCL"));
  EXPECT_THAT(messageThrownBy([] { ncclReductionFor(ReduceOp::SUM, at::kShort); }),
              HasSubstr("cannot reduce tensors of dtype Short (SUM)"));
  EXPECT_THROW(ncclReductionFor(ReduceOp::BAND, at::kInt), c10::ValueError);
  EXPECT_THROW(ncclReductionFor(ReduceOp::MAX, at::kUInt16), c10::TypeError);
}

TEST(NcclTypesTest, FactorsAreForFloatingPointNumbers) {
  const auto op = preMulSum(0.5);
  EXPECT_TRUE(ncclReductionFor(op, at::kBFloat16).isPreMulSum);
  EXPECT_EQ(ncclReductionFor(op, at::kComplexFloat).dtype, ncclFloat32);
  EXPECT_THROW(ncclReductionFor(op, at::kInt), c10::TypeError);
}

}  // namespace
}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
// What every registered codec promises of bytes and values: see kernels/codec.h.
#include "tests/contract/codec_contract.h"

#include <c10/util/Exception.h>

#include <limits>

#include "tests/support/intra_op_threads.h"

namespace bagua {
namespace {

INSTANTIATE_TEST_SUITE_P(EveryCodec, CodecContract, ::testing::ValuesIn(CodecRegistry::names()),
                         [](const auto& it) { return it.param; });

TEST_P(CodecContract, IsDescribed) {
  EXPECT_FALSE(info().summary.empty());
  EXPECT_EQ(info().name, GetParam());
  EXPECT_GT(info().bitsPerElement(), 0);
  const PackedLayout layout = codec().layout();
  EXPECT_GE(layout.headerBytes, 0);
  EXPECT_GT(layout.groupElements, 0);
  EXPECT_GT(layout.groupBytes, 0);
  EXPECT_GT(layout.alignment, 0);
}

// A codec that loses more than the values themselves is worse than none.
TEST_P(CodecContract, RoundTripKeepsMostOfTheValues) {
  forValues([](const at::Tensor& values) {
    const at::Tensor exact = values.to(at::kDouble);
    const at::Tensor error = decoded(encoded(values), values).to(at::kDouble) - exact;
    const double norm = exact.square().sum().item<double>();
    ASSERT_TRUE(error.square().sum().item<double>() < norm || norm == 0) << norm;
  });
}

TEST_P(CodecContract, ZerosDecodeToZeros) {
  forValues([](const at::Tensor& values) {
    const at::Tensor zeros = at::zeros_like(values);
    ASSERT_TRUE(decoded(encoded(zeros), zeros).eq(0).all().item<bool>());
  });
}

TEST_P(CodecContract, EveryByteIsWritten) {
  forValues([](const at::Tensor& values) {
    for (const int64_t extra : {0, 1, 70}) {
      const at::Tensor packed = encoded(values, {}, extra, 0xAA);
      ASSERT_TRUE(sameBits(packed, encoded(values, {}, extra, 0x55)));
      ASSERT_TRUE(packed.narrow(0, packed.numel() - extra, extra).eq(0).all().item<bool>());
    }
  });
}

TEST_P(CodecContract, AnyCutGivesTheSameBytes) {
  forValues([](const at::Tensor& values) {
    at::Tensor packed = packedFor(values.numel());
    codec().start(values, {}, packed);
    for (const auto& piece : shuffledPieces(values.numel())) codec().encode(values, piece, {}, packed);
    ASSERT_TRUE(sameBits(packed, encoded(values)));
  });
}

TEST_P(CodecContract, AnyCutGivesTheSameValues) {
  forValues([](const at::Tensor& values) {
    const at::Tensor packed = encoded(values);
    at::Tensor result = at::full_like(values, 7);
    for (const auto& piece : shuffledPieces(values.numel())) codec().decode(packed, piece, result);
    ASSERT_TRUE(sameBits(result, decoded(packed, values)));
  });
}

// As a pipeline does it: bytes leave when their groups have been coded, and groups are decoded when their bytes have
// come. What has not come yet is something else.
TEST_P(CodecContract, TravelsInPiecesOfAnyBytes) {
  const PackedLayout layout = codec().layout();
  forValues([&](const at::Tensor& values) {
    const int64_t length = values.numel();
    const int64_t bytes = layout.packedBytes(length);
    at::Tensor sent = packedFor(length);
    at::Tensor received = packedFor(length, 0, 0x5A);
    at::Tensor result = at::full_like(values, 7);
    codec().start(values, {}, sent);
    const int64_t step = std::max<int64_t>(bytes / 7, 5);
    for (int64_t begin = 0; begin < bytes; begin += step) {
      const int64_t end = std::min(begin + step, bytes);
      codec().encode(values, layout.begunIn(begin, end, length), {}, sent);
      received.narrow(0, begin, end - begin).copy_(sent.narrow(0, begin, end - begin));
      codec().decode(received, layout.endedIn(begin, end, length), result);
    }
    ASSERT_TRUE(sameBits(received, encoded(values)));
    ASSERT_TRUE(sameBits(result, decoded(received, values)));
  });
}

TEST_P(CodecContract, DecodeAddAddsWhatDecodeWrites) {
  forValues([](const at::Tensor& values) {
    const at::Tensor packed = encoded(values);
    const at::Tensor sums = at::randn({values.numel()}, computeType(values.scalar_type()));
    const at::Tensor expected = sums + decoded(packed, values).to(sums.scalar_type());
    for (const auto& piece : shuffledPieces(values.numel())) {
      at::Tensor part = sums.narrow(0, piece.begin, piece.end - piece.begin);
      codec().decodeAdd(packed, piece, values.scalar_type(), part);
    }
    ASSERT_TRUE(sameBits(sums, expected));
  });
}

TEST_P(CodecContract, AGroupWithANonFiniteValueDecodesToNan) {
  const int64_t group = codec().layout().groupElements;
  const int64_t length = 5 * group + 1;
  for (const auto dtype : kTypes) {
    for (const double poison : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
                                -std::numeric_limits<double>::infinity()}) {
      for (const int64_t position : {int64_t{0}, group - 1, 2 * group, length - 1}) {
        at::Tensor values = at::randn({length}).to(dtype);
        values[position] = poison;
        const int64_t begin = position / group * group;
        const at::Tensor result = decoded(encoded(values), values);
        EXPECT_TRUE(result.narrow(0, begin, std::min(group, length - begin)).isnan().all().item<bool>());
        at::Tensor sums = at::zeros({length}, computeType(dtype));
        codec().decodeAdd(encoded(values), {0, length}, dtype, sums);
        EXPECT_TRUE(sums.isnan().eq(result.isnan()).all().item<bool>());
      }
    }
  }
}

// `length` elements between others that must stay as they are.
struct Guarded {
  Guarded(int64_t length, at::ScalarType dtype)
      : all(at::full({length + 2 * kGuard}, 9, dtype)), values(all.narrow(0, kGuard, length)) {}

  [[nodiscard]] bool isIntact() const {
    return all.narrow(0, 0, kGuard).eq(9).all().item<bool>() &&
           all.narrow(0, kGuard + values.numel(), kGuard).eq(9).all().item<bool>();
  }

  static constexpr int64_t kGuard = 100;
  at::Tensor all;
  at::Tensor values;
};

TEST_P(CodecContract, ADamagedPacketReachesNothingElse) {
  for (const auto dtype : kTypes) {
    for (const int64_t length : lengths()) {
      for (int i = 0; i < 5; ++i) {
        const at::Tensor packed = at::randint(256, {packedFor(length).numel()}, at::kByte);
        Guarded target(length, dtype);
        Guarded sums(length, computeType(dtype));
        Guarded mean(length, dtype);
        at::Tensor ofMean = packedFor(length);
        for (const auto& piece : pieces(length)) {
          codec().decode(packed, piece, target.values);
          at::Tensor part = sums.values.narrow(0, piece.begin, piece.end - piece.begin);
          codec().decodeAdd(packed, piece, dtype, part);
          codec().decodeMean(packed.unsqueeze(0), piece, 1, {}, mean.values, ofMean);
        }
        ASSERT_TRUE(target.isIntact() && sums.isIntact() && mean.isIntact()) << length;
      }
    }
  }
}

TEST_P(CodecContract, ChunksAreCodedLikeEachByItself) {
  const int64_t group = codec().layout().groupElements;
  for (const auto dtype : kTypes) {
    for (const int64_t chunkLength : {group, 3 * group + 1, int64_t{17'000}}) {
      // The last chunks are shorter or empty; rows may be longer.
      for (const auto& [length, extra] : {std::pair(3 * chunkLength, 0), std::pair(2 * chunkLength + 1, 0),
                                          std::pair(chunkLength - 1, 32), std::pair(2 * chunkLength + 1, 5)}) {
        const at::Tensor values = at::randn({length}).to(dtype);
        at::Tensor packed = packedFor(chunkLength, extra).repeat({4, 1});
        codec().encodeChunks(values, chunkLength, {.key = 3}, packed);
        at::Tensor all = at::full_like(values, 7);
        codec().decodeChunks(packed, chunkLength, all);
        for (int64_t row = 0; row < 4; ++row) {
          const int64_t begin = std::min(row * chunkLength, length);
          const at::Tensor chunk = values.narrow(0, begin, std::min(chunkLength, length - begin));
          at::Tensor bytes = packedFor(chunkLength, extra);
          const Encoding encoding = Encoding{.key = 3}.narrow(begin, chunk.numel());
          codec().start(chunk, encoding, bytes);
          codec().encode(chunk, {0, chunk.numel()}, encoding, bytes);
          ASSERT_TRUE(sameBits(packed[row], bytes)) << length << " in chunks of " << chunkLength << ", row " << row;
          ASSERT_TRUE(sameBits(all.narrow(0, begin, chunk.numel()), decoded(bytes, chunk)));
        }
      }
    }
  }
}

TEST_P(CodecContract, BytesAndValuesAreTheSameOnEveryInstructionSet) {
  for (const auto& variant : info().variants) {
    forValues([&](const at::Tensor& values) {
      for (const double scale : {1.0, 1e-6, 1e3}) {
        const at::Tensor scaled = values * scale;
        const at::Tensor packed = encoded(scaled);
        ASSERT_TRUE(sameBits(packed, encodedBy(*variant, scaled)));
        ASSERT_TRUE(sameBits(decoded(packed, scaled), decodedBy(*variant, packed, scaled)));
        const at::Tensor sums = at::randn({values.numel()}, computeType(values.scalar_type()));
        at::Tensor mine = sums.clone();
        at::Tensor other = sums.clone();
        codec().decodeAdd(packed, {0, values.numel()}, values.scalar_type(), mine);
        variant->decodeAdd(packed, {0, values.numel()}, values.scalar_type(), other);
        ASSERT_TRUE(sameBits(mine, other));
      }
    });
  }
}

TEST_P(CodecContract, BytesAndValuesDoNotDependOnTheNumberOfThreads) {
  BAGUA_NEEDS_INTRA_OP_THREADS();
  for (const auto dtype : kTypes) {
    const at::Tensor values = at::randn({70'001}).to(dtype);
    const auto codedOn = [&](int threads) {
      const IntraOpThreads those(threads);
      const at::Tensor packed = encoded(values);
      return std::pair(packed, decoded(packed, values));
    };
    const auto [packed, result] = codedOn(1);
    const auto [otherPacked, otherResult] = codedOn(4);
    EXPECT_TRUE(sameBits(packed, otherPacked));
    EXPECT_TRUE(sameBits(result, otherResult));
  }
}

TEST_P(CodecContract, TellsWhetherTheBytesDependOnTheKey) {
  const at::Tensor values = at::randn({1000});
  for (const auto rounding : {Rounding::kNearest, Rounding::kStochastic}) {
    if (rounding == Rounding::kStochastic && !codec().canRoundStochastically()) continue;
    const at::Tensor one = encoded(values, {.rounding = rounding, .key = 1});
    const at::Tensor other = encoded(values, {.rounding = rounding, .key = 2});
    EXPECT_EQ(!sameBits(one, other), codec().usesKey(rounding));
  }
}

// The same key gives the same bytes, in any pieces; the values are right in the mean over keys.
TEST_P(CodecContract, RandomRoundingHasTheValueAsItsMean) {
  if (!codec().canRoundStochastically()) return;  // The caller will not ask for it.
  const at::Tensor values = at::randn({1000});
  at::Tensor mean = at::zeros({1000}, at::kDouble);
  constexpr int kKeys = 400;
  for (uint64_t key = 0; key < kKeys; ++key) {
    const Encoding encoding{.rounding = Rounding::kStochastic, .key = key};
    const at::Tensor packed = encoded(values, encoding);
    at::Tensor inPieces = packedFor(values.numel());
    codec().start(values, encoding, inPieces);
    for (const auto& piece : shuffledPieces(values.numel())) codec().encode(values, piece, encoding, inPieces);
    ASSERT_TRUE(sameBits(packed, inPieces));
    mean += decoded(packed, values).to(at::kDouble) / kKeys;
  }
  const auto norm = [](const at::Tensor& x) { return x.to(at::kDouble).square().sum().item<double>(); };
  const double once = norm(decoded(encoded(values, {.rounding = Rounding::kStochastic}), values) - values);
  // The variance of a mean of that many; three times it is far out for a sum over a thousand values.
  EXPECT_LT(norm(mean - values), 3 * once / kKeys);
}

TEST(CodecRegistry, RefusesAnUnknownNameWithTheKnownOnes) {
  try {
    CodecRegistry::find("minmax_uint9");
    FAIL() << "a codec of that name was found";
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("minmax_uint8"), std::string::npos) << error.what();
  }
}

TEST(CodecRegistry, RefusesTheNameOrThePositionOfAnother) {
  const auto all = CodecRegistry::names();
  const CodecInfo& known = CodecRegistry::find("int8");
  const auto refusalOf = [](const CodecInfo& info) -> std::string {
    try {
      CodecRegistry::add(info);
    } catch (const c10::Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(
      refusalOf({.name = "int8", .summary = "", .codec = known.codec}).find("two codecs are registered as 'int8'"),
      std::string::npos);
  EXPECT_NE(refusalOf({.name = "int9", .summary = "", .position = known.position, .codec = known.codec})
                .find("codecs 'int8' and 'int9' are both registered at position"),
            std::string::npos);
  EXPECT_EQ(CodecRegistry::names(), all);
}

TEST(CodecRegistry, ListsTheCodecWithoutAPositionLast) {
  EXPECT_EQ(CodecRegistry::find("shortest_for_tests").position, kNoPosition);
  EXPECT_EQ(CodecRegistry::names().back(), "shortest_for_tests");
}

TEST(CodecInfo, RefusesTensorsOfOtherDevices) {
  const CodecInfo& info = CodecRegistry::find("shortest_for_tests");
  info.checkDevice(at::kCPU, "a test");
  CodecRegistry::find("int8").checkDevice(at::kCUDA, "a test");
  try {
    info.checkDevice(at::Device(at::kCUDA, 1), "a test");
    FAIL() << "a codec for the CPU alone takes tensors of CUDA";
  } catch (const c10::NotImplementedError& error) {
    EXPECT_NE(std::string(error.what()).find("a test: codec 'shortest_for_tests' works on tensors of cpu, got cuda:1"),
              std::string::npos)
        << error.what();
  }
}

TEST(PackedLayout, TellsWhichElementsBytesHold) {
  const PackedLayout layout{.headerBytes = 4, .groupElements = 8, .groupBytes = 12, .alignment = 16};
  EXPECT_EQ(layout.packedBytes(0), 16);
  EXPECT_EQ(layout.packedBytes(8), 16);
  EXPECT_EQ(layout.packedBytes(9), 32);
  const auto expect = [](const Piece& piece, int64_t begin, int64_t end) {
    EXPECT_EQ(piece.begin, begin);
    EXPECT_EQ(piece.end, end);
  };
  // Groups begin at bytes 4 and 16, and end at 16 and 28.
  expect(layout.begunIn(0, 4, 9), 0, 0);
  expect(layout.begunIn(0, 5, 9), 0, 8);
  expect(layout.begunIn(5, 16, 9), 8, 8);
  expect(layout.begunIn(16, 32, 9), 8, 9);
  expect(layout.endedIn(0, 15, 9), 0, 0);
  expect(layout.endedIn(15, 16, 9), 0, 8);
  expect(layout.endedIn(16, 27, 9), 8, 8);
  expect(layout.endedIn(27, 32, 9), 8, 9);
}

TEST(Encoding, GivesEveryPartAKeyOfItsOwn) {
  const Encoding whole{.key = 5, .residual = at::arange(6.0F), .nextResidual = at::zeros({6})};
  const Encoding part = whole.narrow(2, 3);
  EXPECT_TRUE(part.residual.equal(at::arange(2.0F, 5.0F)));
  EXPECT_EQ(part.nextResidual.data_ptr(), whole.nextResidual[2].data_ptr());
  EXPECT_NE(part.key, whole.narrow(3, 3).key);
  EXPECT_EQ(part.key, whole.narrow(2, 1).key);
  EXPECT_FALSE(Encoding{}.narrow(2, 3).hasFeedback());
}

}  // namespace
}  // namespace bagua

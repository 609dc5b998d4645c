// SPDX-License-Identifier: Apache-2.0
// What every registered codec promises of error feedback: see Encoding in kernels/codec.h.
#include <iterator>
#include <limits>

#include "tests/contract/codec_contract.h"
#include "tests/support/intra_op_threads.h"

namespace bagua {
namespace {

class CodecFeedbackContract : public CodecContract {
 protected:
  // h of `values`, as the codec adds it up.
  [[nodiscard]] static at::Tensor sumOf(const at::Tensor& values, const at::Tensor& residual) {
    const auto dtype = computeType(values.scalar_type());
    return values.to(dtype) + residual.to(dtype);
  }
};

INSTANTIATE_TEST_SUITE_P(EveryCodec, CodecFeedbackContract, ::testing::ValuesIn(CodecRegistry::names()),
                         [](const auto& it) { return it.param; });

TEST_P(CodecFeedbackContract, LeavesWhatTheDecoderDoesNotGet) {
  forValues([](const at::Tensor& values) {
    const Residuals residuals = residualsFor(values);
    const at::Tensor before = residuals.residual.clone();
    const at::Tensor result = decoded(encoded(values, residuals.encoding()), values);
    const at::Tensor sum = sumOf(values, before);
    ASSERT_TRUE(sameBits(residuals.next, (sum - result.to(sum.scalar_type())).to(at::kFloat)));
    ASSERT_TRUE(sameBits(residuals.residual, before));
  });
}

TEST_P(CodecFeedbackContract, MayWriteWhereItReads) {
  forValues([](const at::Tensor& values) {
    const Residuals residuals = residualsFor(values);
    const at::Tensor both = residuals.residual.clone();
    const at::Tensor expected = encoded(values, residuals.encoding());
    const at::Tensor packed = encoded(values, {.residual = both, .nextResidual = both});
    ASSERT_TRUE(sameBits(packed, expected));
    ASSERT_TRUE(sameBits(both, residuals.next));
  });
}

TEST_P(CodecFeedbackContract, WithoutAResidualYetIsPlainCoding) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const at::Tensor values = at::randn({1000}, dtype);
    const Encoding encoding{.residual = at::zeros({1000}), .nextResidual = at::empty({1000})};
    EXPECT_TRUE(sameBits(encoded(values, encoding), encoded(values)));
  }
}

TEST_P(CodecFeedbackContract, AnyCutGivesTheSame) {
  forValues([](const at::Tensor& values) {
    const Residuals residuals = residualsFor(values);
    const at::Tensor expected = encoded(values, residuals.encoding());
    const at::Tensor both = residuals.residual.clone();
    const Encoding encoding{.residual = both, .nextResidual = both};
    at::Tensor packed = packedFor(values.numel());
    codec().start(values, encoding, packed);
    for (const auto& piece : shuffledPieces(values.numel())) codec().encode(values, piece, encoding, packed);
    ASSERT_TRUE(sameBits(packed, expected));
    ASSERT_TRUE(sameBits(both, residuals.next));
  });
}

TEST_P(CodecFeedbackContract, ChunksHaveTheirOwn) {
  for (const auto dtype : kTypes) {
    const int64_t chunkLength = 2 * codec().layout().groupElements + 1;
    const at::Tensor values = at::randn({2 * chunkLength + 3}).to(dtype);
    for (const int64_t extra : {0, 5}) {
      const Residuals residuals = residualsFor(values);
      at::Tensor packed = packedFor(chunkLength, extra).repeat({4, 1});
      codec().encodeChunks(values, chunkLength, residuals.encoding(), packed);
      const Residuals expected{residuals.residual, at::empty_like(residuals.next)};
      for (int64_t row = 0; row < 4; ++row) {
        const int64_t begin = std::min(row * chunkLength, values.numel());
        const int64_t length = std::min(chunkLength, values.numel() - begin);
        at::Tensor bytes = packedFor(chunkLength, extra);
        const Encoding part = expected.encoding().narrow(begin, length);
        codec().start(values.narrow(0, begin, length), part, bytes);
        codec().encode(values.narrow(0, begin, length), {0, length}, part, bytes);
        ASSERT_TRUE(sameBits(packed[row], bytes)) << row;
      }
      ASSERT_TRUE(sameBits(residuals.next, expected.next));
    }
  }
}

TEST_P(CodecFeedbackContract, KeepsTheResidualOfWhatDecodesToNan) {
  const int64_t length = 5 * codec().layout().groupElements + 1;
  for (const auto dtype : kTypes) {
    for (const double poison : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      at::Tensor values = at::randn({length}).to(dtype);
      values[length / 2] = poison;
      const Residuals residuals = residualsFor(values);
      const at::Tensor isLost = decoded(encoded(values, residuals.encoding()), values).isnan();
      EXPECT_TRUE(isLost[length / 2].item<bool>());
      EXPECT_TRUE(residuals.next.eq(residuals.residual).logical_or(isLost.logical_not()).all().item<bool>());
      EXPECT_TRUE(residuals.next.isfinite().all().item<bool>());
    }
  }
}

// Every way to code values, or a mean of copies of them, with these residuals. The bytes that come out.
using Way = at::Tensor (*)(const Codec& codec, const at::Tensor& values, const Encoding& encoding);

class CodecAfterALostStep : public CodecFeedbackContract {
 protected:
  [[nodiscard]] static at::Tensor whole(const Codec& codec, const at::Tensor& values, const Encoding& encoding) {
    return encodedBy(codec, values, encoding);
  }

  [[nodiscard]] static at::Tensor inPieces(const Codec& codec, const at::Tensor& values, const Encoding& encoding) {
    at::Tensor packed = packedFor(values.numel());
    codec.start(values, encoding, packed);
    for (const auto& piece : shuffledPieces(values.numel())) codec.encode(values, piece, encoding, packed);
    return packed;
  }

  [[nodiscard]] static at::Tensor inChunks(const Codec& codec, const at::Tensor& values, const Encoding& encoding) {
    const int64_t chunkLength = values.numel() / 3 + 1;
    at::Tensor packed = packedFor(chunkLength).repeat({4, 1});
    codec.encodeChunks(values, chunkLength, encoding, packed);
    return packed;
  }

  [[nodiscard]] static at::Tensor copiesOf(const at::Tensor& values) {
    return at::stack({encoded(values), encoded(values * 2)});
  }

  [[nodiscard]] static at::Tensor mean(const Codec& codec, const at::Tensor& values, const Encoding& encoding) {
    at::Tensor mean = at::empty_like(values);
    at::Tensor packed = packedFor(values.numel());
    codec.decodeMeanAndEncode(copiesOf(values), 2, encoding, mean, packed);
    return packed;
  }

  [[nodiscard]] static at::Tensor meanInPieces(const Codec& codec, const at::Tensor& values, const Encoding& encoding) {
    at::Tensor mean = at::empty_like(values);
    at::Tensor packed = packedFor(values.numel());
    for (const auto& piece : pieces(values.numel())) {
      codec.decodeMean(copiesOf(values), piece, 2, encoding, mean, packed);
    }
    for (const auto& piece : shuffledPieces(values.numel())) codec.encode(mean, piece, encoding, packed);
    return packed;
  }

  static void expectTheResidualOf(bool wasLost, Way way, const Codec& codec, const at::Tensor& values) {
    const at::Tensor kept = at::randn({values.numel()}) * 0.1;
    const Residuals expected{kept.clone(), at::empty_like(kept)};
    const at::Tensor bytes = way(codec, values, expected.encoding());
    // What the lost step wrote.
    const at::Tensor other = at::randn({values.numel()}) * 5;
    Encoding encoding{.residual = wasLost ? other : kept.clone(),
                      .nextResidual = wasLost ? kept.clone() : other,
                      .wasLost = at::full({}, wasLost, at::kBool)};
    ASSERT_TRUE(sameBits(way(codec, values, encoding), bytes));
    ASSERT_TRUE(sameBits(encoding.nextResidual, expected.next));
    // If this step is lost too, the next one finds it there.
    ASSERT_TRUE(sameBits(encoding.residual, kept));
    encoding.residual = encoding.nextResidual = kept;
    ASSERT_TRUE(sameBits(way(codec, values, encoding), bytes)) << "in one tensor";
    ASSERT_TRUE(sameBits(kept, expected.next)) << "in one tensor";
  }
};

INSTANTIATE_TEST_SUITE_P(EveryCodec, CodecAfterALostStep, ::testing::ValuesIn(CodecRegistry::names()),
                         [](const auto& it) { return it.param; });

TEST_P(CodecAfterALostStep, GoesOnFromTheResidualBefore) {
  auto codecs = info().variants;
  if (codecs.empty()) codecs.push_back(info().codec);
  constexpr Way kWays[] = {whole, inPieces, inChunks, mean, meanInPieces};
  forValues([&](const at::Tensor& values) {
    if (values.numel() > 500) values[values.numel() / 2] = std::numeric_limits<double>::infinity();
    for (const auto& codec : codecs) {
      for (size_t way = 0; way < std::size(kWays); ++way) {
        SCOPED_TRACE(way);
        for (const bool wasLost : {true, false}) expectTheResidualOf(wasLost, kWays[way], *codec, values);
        if (HasFatalFailure()) return;
      }
    }
  });
}

double largestOf(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return std::numeric_limits<double>::max();
    case at::kFloat:
      return std::numeric_limits<float>::max();
    case at::kHalf:
      return 65504;
    default:
      return 0x1.FEp127;
  }
}

// At the largest finite values a residual must not become an overflow, which would never leave it again.
TEST_P(CodecFeedbackContract, StaysFiniteAtTheLargestValues) {
  for (const auto dtype : kTypes) {
    const double largest = largestOf(dtype);
    const at::Tensor values = (at::randint(-3, 4, {1000}, at::kDouble) / 3 * largest).to(dtype);
    at::Tensor residual = at::zeros({1000});
    for (int step = 0; step < 3; ++step) {
      const at::Tensor packed = encoded(values, {.residual = residual, .nextResidual = residual});
      // Later h itself may be beyond the largest float.
      ASSERT_TRUE(step > 0 || decoded(packed, values).isfinite().all().item<bool>()) << dtype;
      ASSERT_TRUE(residual.isfinite().all().item<bool>()) << dtype << " in step " << step;
    }
  }
}

// Nothing is lost: what has been decoded so far is what went in, but for the last residual.
TEST_P(CodecFeedbackContract, SumsOverStepsTelescope) {
  constexpr int64_t kLength = 1000;
  constexpr int kSteps = 50;
  for (const auto dtype : kTypes) {
    at::Tensor residual = at::zeros({kLength});
    at::Tensor in = at::zeros({kLength}, at::kDouble);
    at::Tensor out = at::zeros({kLength}, at::kDouble);
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor values = at::randn({kLength}).to(dtype);
      out += decoded(encoded(values, {.residual = residual, .nextResidual = residual}), values).to(at::kDouble);
      in += values.to(at::kDouble);
    }
    // A step rounds h and its rest to float32, where they are below 16.
    const double bound = kSteps * 2 * 16 * 0x1p-24;
    EXPECT_LT((in - out - residual.to(at::kDouble)).abs().max().item<double>(), bound) << dtype;
    EXPECT_LT(residual.abs().max().item<float>(), 16) << dtype;
  }
}

TEST_P(CodecFeedbackContract, IsTheSameOnEveryInstructionSet) {
  for (const auto& variant : info().variants) {
    forValues([&](const at::Tensor& values) {
      for (const double scale : {1.0, 1e-6, 1e3}) {
        const at::Tensor scaled = values * scale;
        const at::Tensor residual = at::randn({values.numel()}) * 0.01 * scale;
        const Residuals mine{residual, at::full_like(residual, 7)};
        const Residuals other{residual, at::full_like(residual, 8)};
        ASSERT_TRUE(sameBits(encoded(scaled, mine.encoding()), encodedBy(*variant, scaled, other.encoding())));
        ASSERT_TRUE(sameBits(mine.next, other.next));
      }
    });
  }
}

TEST_P(CodecFeedbackContract, DoesNotDependOnTheNumberOfThreads) {
  BAGUA_NEEDS_INTRA_OP_THREADS();
  for (const auto dtype : kTypes) {
    const at::Tensor values = at::randn({70'001}).to(dtype);
    const at::Tensor residual = at::randn({70'001}) * 0.01;
    const auto codedOn = [&](int threads) {
      const IntraOpThreads those(threads);
      const Residuals residuals{residual, at::empty_like(residual)};
      const at::Tensor packed = encoded(values, residuals.encoding());
      return std::pair(packed, residuals.next);
    };
    const auto [packed, next] = codedOn(1);
    const auto [otherPacked, otherNext] = codedOn(4);
    EXPECT_TRUE(sameBits(packed, otherPacked));
    EXPECT_TRUE(sameBits(next, otherNext));
  }
}

}  // namespace
}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
// What every registered codec promises of means: see Codec::decodeMean() in kernels/codec.h.
#include <limits>

#include "tests/contract/codec_contract.h"
#include "tests/support/intra_op_threads.h"

namespace bagua {
namespace {

class CodecMeanContract : public CodecContract {
 protected:
  // What `ranks` ranks sent about a chunk, in rows further apart than they have to be.
  [[nodiscard]] static at::Tensor copies(int64_t ranks, int64_t length, at::ScalarType dtype) {
    const int64_t bytes = codec().layout().packedBytes(length);
    at::Tensor rows = at::full({ranks, bytes + 41}, 0xA5, at::kByte).narrow(1, 0, bytes);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      rows[rank].copy_(encoded((at::randn({length}, at::kDouble) + 1).to(dtype)));
    }
    return rows;
  }

  struct Result {
    at::Tensor mean;
    at::Tensor packed;
    at::Tensor nextResidual;

    [[nodiscard]] bool operator==(const Result& other) const {
      return sameBits(mean, other.mean) && sameBits(packed, other.packed) && sameBits(nextResidual, other.nextResidual);
    }
  };

  // With feedback, from residuals that are the same at each call.
  [[nodiscard]] static Result meanBy(const Codec& codec, const at::Tensor& copies, int64_t length, at::ScalarType dtype,
                                     const std::vector<Piece>& pieces, int64_t extra = 0) {
    Result result{at::full({length}, 7, dtype), packedFor(length, extra), at::zeros({length})};
    const Encoding encoding{.residual = at::arange(length).sin().to(at::kFloat), .nextResidual = result.nextResidual};
    const auto divisor = static_cast<double>(copies.size(0));
    if (pieces.empty()) {
      codec.decodeMeanAndEncode(copies, divisor, encoding, result.mean, result.packed);
      return result;
    }
    for (const auto& piece : pieces) codec.decodeMean(copies, piece, divisor, encoding, result.mean, result.packed);
    for (const auto& piece : shuffledPieces(length)) codec.encode(result.mean, piece, encoding, result.packed);
    return result;
  }

  template <class F>
  static void forCopies(const F& f) {
    for (const auto dtype : kTypes) {
      for (const int64_t length : lengths()) {
        for (const int64_t ranks : {1, 2, 9}) {
          SCOPED_TRACE(std::to_string(ranks) + " of " + std::to_string(length) + " " + c10::toString(dtype));
          f(copies(ranks, length, dtype), length, dtype);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(EveryCodec, CodecMeanContract, ::testing::ValuesIn(CodecRegistry::names()),
                         [](const auto& it) { return it.param; });

double unitOf(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 0x1p-53;
    case at::kFloat:
      return 0x1p-24;
    case at::kHalf:
      return 0x1p-11;
    default:
      return 0x1p-8;
  }
}

// Half the distance of the smallest numbers of a type.
double smallestOf(at::ScalarType dtype) { return dtype == at::kHalf ? 0x1p-25 : 0x1p-134; }

// One rounding for each addition and the division, here as there, and the rounding to the type of the values.
TEST_P(CodecMeanContract, IsTheMeanOfTheDecodedCopies) {
  forCopies([](const at::Tensor& copies, int64_t length, at::ScalarType dtype) {
    const auto ranks = static_cast<double>(copies.size(0));
    const at::Tensor like = at::empty({length}, dtype);
    at::Tensor expected = at::zeros({length}, at::kDouble);
    at::Tensor sizes = at::zeros({length}, at::kDouble);
    for (int64_t rank = 0; rank < copies.size(0); ++rank) {
      const at::Tensor values = decoded(copies[rank], like).to(at::kDouble);
      expected += values / ranks;
      sizes += values.abs() / ranks;
    }
    at::Tensor mean = at::full_like(like, 7);
    at::Tensor packed = packedFor(length);
    codec().decodeMean(copies, {0, length}, ranks, {}, mean, packed);
    const at::Tensor bound = 2 * (ranks + 1) * unitOf(computeType(dtype)) * sizes +
                             1.01 * unitOf(dtype) * expected.abs() + smallestOf(dtype);
    ASSERT_TRUE((mean.to(at::kDouble) - expected).abs().le(bound).all().item<bool>());
  });
}

TEST_P(CodecMeanContract, IsDividedByTheDivisor) {
  for (const auto dtype : kTypes) {
    const at::Tensor values = at::randn({100}).to(dtype);
    at::Tensor mean = at::full_like(values, 7);
    at::Tensor packed = packedFor(100);
    codec().decodeMean(encoded(values).unsqueeze(0), {0, 100}, 4, {}, mean, packed);
    // Powers of two do not round.
    EXPECT_TRUE(sameBits(mean, decoded(encoded(values), values) / 4));
  }
}

TEST_P(CodecMeanContract, IsReadyToBeCodedOnceAllPiecesAreThere) {
  forCopies([](const at::Tensor& copies, int64_t length, at::ScalarType dtype) {
    const auto whole = meanBy(codec(), copies, length, dtype, {{0, length}}, 33);
    at::Tensor expected = packedFor(length, 33);
    const Residuals residuals{at::arange(length).sin().to(at::kFloat), at::zeros({length})};
    codec().start(whole.mean, residuals.encoding(), expected);
    codec().encode(whole.mean, {0, length}, residuals.encoding(), expected);
    ASSERT_TRUE(whole == (Result{whole.mean, expected, residuals.next}));
    ASSERT_TRUE(whole == meanBy(codec(), copies, length, dtype, pieces(length), 33)) << "in pieces";
    ASSERT_TRUE(whole == meanBy(codec(), copies, length, dtype, {}, 33)) << "in one call";
  });
}

TEST_P(CodecMeanContract, WithoutFeedbackIsReadyToo) {
  forCopies([](const at::Tensor& copies, int64_t length, at::ScalarType dtype) {
    at::Tensor mean = at::full({length}, 7, dtype);
    at::Tensor packed = packedFor(length);
    for (const auto& piece : pieces(length)) codec().decodeMean(copies, piece, 3, {}, mean, packed);
    codec().encode(mean, {0, length}, {}, packed);
    ASSERT_TRUE(sameBits(packed, encoded(mean)));
    // Rows one after another are what a fused loop may count on.
    for (const at::Tensor& rows : {copies, copies.contiguous()}) {
      at::Tensor meanAtOnce = at::full({length}, 7, dtype);
      at::Tensor packedAtOnce = packedFor(length);
      codec().decodeMeanAndEncode(rows, 3, {}, meanAtOnce, packedAtOnce);
      ASSERT_TRUE(sameBits(meanAtOnce, mean));
      ASSERT_TRUE(sameBits(packedAtOnce, packed));
    }
  });
}

TEST_P(CodecMeanContract, IsTheSameOnEveryInstructionSet) {
  for (const auto& variant : info().variants) {
    forCopies([&](const at::Tensor& copies, int64_t length, at::ScalarType dtype) {
      const std::vector<Piece> whole = {{0, length}};
      ASSERT_TRUE(meanBy(*variant, copies, length, dtype, whole) == meanBy(codec(), copies, length, dtype, whole));
    });
  }
}

TEST_P(CodecMeanContract, DoesNotDependOnTheNumberOfThreads) {
  BAGUA_NEEDS_INTRA_OP_THREADS();
  constexpr int64_t kLength = 70'001;
  for (const auto dtype : kTypes) {
    const at::Tensor received = copies(3, kLength, dtype);
    const auto meanOn = [&](int threads) {
      const IntraOpThreads those(threads);
      return meanBy(codec(), received, kLength, dtype, pieces(kLength));
    };
    EXPECT_TRUE(meanOn(1) == meanOn(4));
  }
}

TEST_P(CodecMeanContract, ASumBeyondTheLargestNumberIsNoFiniteOne) {
  const at::Tensor values = at::full({300}, 6e4, at::kHalf);
  const at::Tensor received = at::stack({encoded(values), encoded(values)});
  for (const double divisor : {1, 2}) {
    at::Tensor mean = at::full_like(values, 7);
    at::Tensor packed = packedFor(300);
    codec().decodeMean(received, {0, 300}, divisor, {}, mean, packed);
    EXPECT_EQ(mean.isfinite().all().item<bool>(), divisor == 2);
  }
}

// Overflow in a gradient has to be seen by whoever gets the mean.
TEST_P(CodecMeanContract, OfANonFiniteCopyIsNan) {
  const int64_t group = codec().layout().groupElements;
  const int64_t length = group * 3;
  for (const auto dtype : kTypes) {
    at::Tensor values = at::randn({length}).to(dtype);
    values[group - 1] = std::numeric_limits<double>::infinity();
    const at::Tensor received = at::stack({encoded(at::zeros_like(values)), encoded(values)});
    const auto result = meanBy(codec(), received, length, dtype, {{0, length}});
    EXPECT_TRUE(result.mean.narrow(0, 0, group).isnan().all().item<bool>());
    EXPECT_TRUE(decoded(result.packed, values)[group - 1].isnan().item<bool>());
    EXPECT_TRUE(result.nextResidual.isfinite().all().item<bool>());
  }
}

}  // namespace
}  // namespace bagua

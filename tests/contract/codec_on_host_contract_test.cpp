// SPDX-License-Identifier: Apache-2.0
// What every registered codec promises on CUDA, without a GPU: its kernels run on the host.
#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "tests/contract/codec_device_contract.h"
#include "tests/support/cuda_on_host/codecs_on_host.h"
#include "tests/support/cuda_on_host/grid.h"

namespace bagua {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kGuardBehind = 0;  // AddressSanitizer sees what is read and written there.
#else
constexpr size_t kGuardBehind = 256;
#endif

// Bytes between others that must stay as they are.
class GuardedBytes {
 public:
  GuardedBytes(size_t offset, size_t size)
      : before_(kAlignment + offset), size_(size), total_(before_ + size + kGuardBehind), all_(allocate(total_)) {
    std::fill_n(all_.get(), total_, kGuard);
  }
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;

  ~GuardedBytes() {
    const auto isGuard = [](uint8_t byte) { return byte == kGuard; };
    EXPECT_TRUE(std::all_of(all_.get(), data(), isGuard)) << "written in front of " << size_ << " bytes";
    EXPECT_TRUE(std::all_of(data() + size_, all_.get() + total_, isGuard)) << "written behind " << size_ << " bytes";
  }

  [[nodiscard]] uint8_t* data() const { return all_.get() + before_; }

 private:
  static constexpr size_t kAlignment = 256;
  static constexpr uint8_t kGuard = 0x5A;

  struct Free {
    void operator()(uint8_t* bytes) const { std::free(bytes); }
  };

  static uint8_t* allocate(size_t bytes) {
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, kAlignment, bytes) == 0, "no memory for ", bytes, " bytes of a test");
    return static_cast<uint8_t*>(memory);
  }

  size_t before_;
  size_t size_;
  size_t total_;
  std::unique_ptr<uint8_t, Free> all_;
};

// How the emulated device is, and where tensors lie on it.
struct Setting {
  int multiprocessors;
  int64_t mostBlocks;
  // Elements between an aligned address and a tensor.
  int64_t offset;
};

// As many blocks as there can be, and blocks that take several items.
constexpr Setting kSettings[] = {{3, 1 << 20, 0}, {1, 2, 1}};

int64_t offsetOfTensors = 0;

// Exactly as much memory as the tensor needs.
at::Tensor copyOf(const at::Tensor& tensor) {
  // As on a GPU, nothing has no address.
  if (tensor.numel() == 0) return at::empty_like(tensor);
  const at::Tensor source = tensor.contiguous();
  const auto offset = static_cast<size_t>(offsetOfTensors) * source.itemsize();
  const auto bytes = std::make_shared<GuardedBytes>(offset, source.nbytes());
  std::memcpy(bytes->data(), source.const_data_ptr(), source.nbytes());
  return at::from_blob(
      bytes->data(), source.sizes(), [bytes](void* /*data*/) {}, source.options());
}

class CodecOnHostContract : public CodecDeviceContract {
 protected:
  void SetUp() override {
    CodecDeviceContract::SetUp();
    // Workspaces are full of NaN, not of what happens to be there.
    at::globalContext().setDeterministicAlgorithms(true, false);
    cuda_on_host::device().seed = 1;
  }

  void TearDown() override { at::globalContext().setDeterministicAlgorithms(false, false); }

  // f(side) for each setting.
  template <class F>
  static void forSettings(const F& f) {
    for (const Setting& setting : kSettings) {
      SCOPED_TRACE("at most " + std::to_string(setting.mostBlocks) + " blocks, " +
                   std::to_string(setting.multiprocessors) + " multiprocessors, offset " +
                   std::to_string(setting.offset));
      cuda_on_host::device().multiprocessors = setting.multiprocessors;
      cuda_on_host::device().mostBlocks = setting.mostBlocks;
      offsetOfTensors = setting.offset;
      f(Side{cuda_on_host::codec(GetParam()), copyOf});
      if (HasFatalFailure()) return;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(EveryCodec, CodecOnHostContract, ::testing::ValuesIn(CodecRegistry::names()),
                         [](const auto& it) { return it.param; });

TEST_P(CodecOnHostContract, CodesAndDecodesLikeTheCpu) { forSettings(codesAndDecodesLikeTheCpu); }

TEST_P(CodecOnHostContract, CodesSpecialValuesLikeTheCpu) { forSettings(codesSpecialValuesLikeTheCpu); }

TEST_P(CodecOnHostContract, DecodesDamagedPacketsLikeTheCpu) { forSettings(decodesDamagedPacketsLikeTheCpu); }

TEST_P(CodecOnHostContract, CodesManyChunksLikeTheCpu) { forSettings(codesManyChunksLikeTheCpu); }

TEST_P(CodecOnHostContract, MakesTheMeansOfTheCpu) { forSettings(makesTheMeansOfTheCpu); }

TEST_P(CodecOnHostContract, MakesTheMeansOfAnyNumberOfCopies) { forSettings(makesTheMeansOfAnyNumberOfCopies); }

}  // namespace
}  // namespace bagua

// SPDX-License-Identifier: Apache-2.0
// What every registered codec promises on CUDA, without a GPU: its kernels run on the CPU.
#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "tests/contract/codec_device_contract.h"
#include "tests/support/cuda_on_cpu/codecs_on_cpu.h"
#include "tests/support/cuda_on_cpu/grid.h"

namespace bagua {
namespace {

// Bytes for a tensor, which begin at an aligned address or end where memory does: there the process ends that reads
// behind them. (AddressSanitizer sees every byte that is read or written behind.) Those in front must stay as they are,
// and those behind.
class GuardedBytes {
 public:
  GuardedBytes(size_t size, bool isAligned) : size_(size), pages_((size + 2 * kGuardBytes) / kPage + 1) {
    void* memory = mmap(nullptr, (pages_ + 1) * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "no memory for ", size, " bytes of a test");
    begin_ = static_cast<uint8_t*>(memory);
    end_ = begin_ + pages_ * kPage;
    TORCH_CHECK(mprotect(end_, kPage, PROT_NONE) == 0, "cannot protect a page");
    data_ = isAligned ? begin_ + kGuardBytes : end_ - size;
    std::fill(begin_, end_, kGuard);
    poison(data_ + size_, end_);
  }
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;

  ~GuardedBytes() {
    unpoison(data_ + size_, end_);
    const auto isGuard = [](uint8_t byte) { return byte == kGuard; };
    EXPECT_TRUE(std::all_of(begin_, data_, isGuard)) << "written in front of " << size_ << " bytes";
    EXPECT_TRUE(std::all_of(data_ + size_, end_, isGuard)) << "written behind " << size_ << " bytes";
    munmap(begin_, (pages_ + 1) * kPage);
  }

  [[nodiscard]] uint8_t* data() const { return data_; }

 private:
  inline static const auto kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  static constexpr size_t kGuardBytes = 256;
  static constexpr uint8_t kGuard = 0x5A;

  static void poison([[maybe_unused]] const uint8_t* begin, [[maybe_unused]] const uint8_t* end) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(begin, static_cast<size_t>(end - begin));
#endif
  }
  static void unpoison([[maybe_unused]] const uint8_t* begin, [[maybe_unused]] const uint8_t* end) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(begin, static_cast<size_t>(end - begin));
#endif
  }

  size_t size_;
  size_t pages_;
  uint8_t* begin_ = nullptr;
  uint8_t* end_ = nullptr;
  uint8_t* data_ = nullptr;
};

// How the emulated device is, and where tensors lie on it.
struct Setting {
  int multiprocessors;
  // Tensors begin at an aligned address, or end where memory does and so begin anywhere.
  bool areAligned;
};

// Several blocks, and few of them, which take several items.
constexpr Setting kSettings[] = {{3, true}, {1, false}};

bool areTensorsAligned = true;

// Exactly as much memory as the tensor needs.
at::Tensor copyOf(const at::Tensor& tensor) {
  // As on a GPU, nothing has no address.
  if (tensor.numel() == 0) return at::empty_like(tensor);
  const at::Tensor source = tensor.contiguous();
  const auto bytes = std::make_shared<GuardedBytes>(source.nbytes(), areTensorsAligned);
  std::memcpy(bytes->data(), source.const_data_ptr(), source.nbytes());
  return at::from_blob(
      bytes->data(), source.sizes(), [bytes](void* /*data*/) {}, source.options());
}

class CodecOnCpuContract : public CodecDeviceContract {
 protected:
  void SetUp() override {
    CodecDeviceContract::SetUp();
    // Workspaces are full of NaN, not of what happens to be there.
    at::globalContext().setDeterministicAlgorithms(true, false);
    cuda_on_cpu::device().seed = 1;
  }

  void TearDown() override { at::globalContext().setDeterministicAlgorithms(false, false); }

  // f(side) for each setting.
  template <class F>
  static void forSettings(const F& f) {
    for (const Setting& setting : kSettings) {
      SCOPED_TRACE(std::to_string(setting.multiprocessors) + " multiprocessors, " +
                   (setting.areAligned ? "aligned" : "not aligned"));
      cuda_on_cpu::device().multiprocessors = setting.multiprocessors;
      areTensorsAligned = setting.areAligned;
      f(Side{cuda_on_cpu::codec(GetParam()), copyOf});
      if (HasFatalFailure()) return;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(EveryCodec, CodecOnCpuContract, ::testing::ValuesIn(codecsOn(at::kCUDA)),
                         [](const auto& it) { return it.param; });

TEST_P(CodecOnCpuContract, CodesAndDecodesLikeTheCpu) { forSettings(codesAndDecodesLikeTheCpu); }

TEST_P(CodecOnCpuContract, CodesSpecialValuesLikeTheCpu) { forSettings(codesSpecialValuesLikeTheCpu); }

TEST_P(CodecOnCpuContract, DecodesDamagedPacketsLikeTheCpu) { forSettings(decodesDamagedPacketsLikeTheCpu); }

TEST_P(CodecOnCpuContract, CodesManyChunksLikeTheCpu) { forSettings(codesManyChunksLikeTheCpu); }

TEST_P(CodecOnCpuContract, MakesTheMeansOfTheCpu) { forSettings(makesTheMeansOfTheCpu); }

TEST_P(CodecOnCpuContract, MakesTheMeansOfAnyNumberOfCopies) { forSettings(makesTheMeansOfAnyNumberOfCopies); }

}  // namespace
}  // namespace bagua

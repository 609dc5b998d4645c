// SPDX-License-Identifier: Apache-2.0
#include "backend/os/scratch_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "kernels/device_ways.h"

namespace bagua {
namespace {

// What is shorter costs little wherever it lies.
constexpr int64_t kShortestBlock = int64_t{256} << 10;
// What is longer is rare, and glibc gives it back to the system when it is freed (DEFAULT_MMAP_THRESHOLD_MAX).
constexpr int64_t kLongestBlock = int64_t{32} << 20;

// AddressSanitizer finds what is used after it was returned, or beyond its end, only in memory of its own.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kIsShared = false;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
constexpr bool kIsShared = false;
#else
constexpr bool kIsShared = true;
#endif
#else
constexpr bool kIsShared = true;
#endif

}  // namespace

// Pages of the system, and not of the C library, which would keep them for the thread that frees them.
class ScratchMemory::Block {
 public:
  explicit Block(int64_t bytes)
      : bytes_(bytes), data_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    TORCH_CHECK(data_ != MAP_FAILED, "bagua: there are no ", bytes, " bytes for an exchange: ", std::strerror(errno));
  }
  ~Block() { ::munmap(data_, bytes_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  [[nodiscard]] int64_t bytes() const { return bytes_; }
  [[nodiscard]] void* data() const { return data_; }

 private:
  const int64_t bytes_;
  void* const data_;
};

ScratchMemory::ScratchMemory() = default;
ScratchMemory::~ScratchMemory() = default;

ScratchMemory& ScratchMemory::ofProcess() {
  static auto* const memory = new ScratchMemory;
  return *memory;
}

namespace {
// Made when the library is loaded: a fork while another thread makes it would leave it unmade in the child for ever.
[[maybe_unused]] const ScratchMemory& madeEarly = ScratchMemory::ofProcess();
}  // namespace

std::shared_ptr<void> ScratchMemory::take(int64_t bytes) {
  const auto owned = std::make_shared<std::unique_ptr<Block>>(takeIdle(bytes));
  auto& block = *owned;
  if (!block) {
    block = std::make_unique<Block>(bytes);
    std::vector<std::unique_ptr<Block>> dropped;
    const std::lock_guard lock(mutex_);
    idle_.reserve(blocks_ + 1);
    dropped.reserve(idle_.size());
    ++blocks_;
    heldBytes_ += bytes;
    inUse_ += bytes;
    mostInUse_ = std::max(mostInUse_, inUse_);
    // The oldest first.
    while (heldBytes_ > mostInUse_) {
      heldBytes_ -= idle_.front()->bytes();
      --blocks_;
      dropped.push_back(std::move(idle_.front()));
      idle_.erase(idle_.begin());
    }
  }
  return {block->data(), [this, owned](void* /*data*/) noexcept { giveBack(std::move(*owned)); }};
}

std::unique_ptr<ScratchMemory::Block> ScratchMemory::takeIdle(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  auto shortest = idle_.end();
  for (auto block = idle_.begin(); block != idle_.end(); ++block) {
    const int64_t length = (*block)->bytes();
    if (length < bytes || length > 2 * bytes) continue;
    if (shortest == idle_.end() || length < (*shortest)->bytes()) shortest = block;
  }
  if (shortest == idle_.end()) return nullptr;
  std::unique_ptr<Block> block = std::move(*shortest);
  idle_.erase(shortest);
  inUse_ += block->bytes();
  mostInUse_ = std::max(mostInUse_, inUse_);
  return block;
}

void ScratchMemory::giveBack(std::unique_ptr<Block> block) noexcept {
  const std::lock_guard lock(mutex_);
  inUse_ -= block->bytes();
  idle_.push_back(std::move(block));
}

int64_t ScratchMemory::heldBytes() {
  const std::lock_guard lock(mutex_);
  return heldBytes_;
}

at::Tensor scratchTensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(options.dtype().itemsize());
  const bool isShared = kIsShared && worksOnCpu(options.device()) && bytes >= kShortestBlock && bytes <= kLongestBlock;
  if (!isShared) return at::empty(sizes, options);
  std::shared_ptr<void> block = ScratchMemory::ofProcess().take(bytes);
  void* const data = block.get();
  return at::from_blob(
      data, sizes, [block = std::move(block)](void* /*data*/) mutable { block.reset(); }, options);
}

at::Tensor scratchLike(const at::Tensor& like) { return scratchTensor(like.sizes(), like.options()); }

at::Tensor scratchCopy(const at::Tensor& values, at::ScalarType dtype) {
  at::Tensor copy = scratchTensor(values.sizes(), values.options().dtype(dtype));
  return copy.copy_(values);
}

}  // namespace bagua

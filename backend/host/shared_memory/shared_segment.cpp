// SPDX-License-Identifier: Apache-2.0
#include "backend/host/shared_memory/shared_segment.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

namespace bagua {
namespace {

std::string newName() {
  std::random_device random;
  return "/bagua-" + std::to_string(::getpid()) + "-" + std::to_string((uint64_t{random()} << 32U) | random());
}

std::string withErrno(const char* call, int error) { return std::string(call) + ": " + std::strerror(error); }

struct flock lockOf(int seat, short type) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = seat;
  lock.l_len = 1;
  return lock;
}

}  // namespace

std::optional<SharedSegment> SharedSegment::create(size_t bytes, std::string& whyNot) {
  const std::string name = newName();
  const int file = ::shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (file < 0) {
    whyNot = withErrno("shm_open", errno);
    return std::nullopt;
  }
  // Reserved now: memory that is found missing later would end the process by a signal.
  if (const int error = ::posix_fallocate(file, 0, static_cast<off_t>(bytes))) {
    whyNot = withErrno("posix_fallocate", error);
    ::close(file);
    ::shm_unlink(name.c_str());
    return std::nullopt;
  }
  return map(name, file, bytes, true, whyNot);
}

std::optional<SharedSegment> SharedSegment::open(const std::string& name, size_t bytes, std::string& whyNot) {
  const int file = ::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
  if (file < 0) {
    whyNot = withErrno("shm_open", errno);
    return std::nullopt;
  }
  return map(name, file, bytes, false, whyNot);
}

std::optional<SharedSegment> SharedSegment::map(const std::string& name, int file, size_t bytes, bool ownsName,
                                                std::string& whyNot) {
  void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (data == MAP_FAILED) {
    whyNot = withErrno("mmap", errno);
    ::close(file);
    if (ownsName) ::shm_unlink(name.c_str());
    return std::nullopt;
  }
  return SharedSegment(name, file, static_cast<uint8_t*>(data), bytes, ownsName);
}

SharedSegment::SharedSegment(SharedSegment&& other) noexcept
    : name_(std::move(other.name_)),
      file_(std::exchange(other.file_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      ownsName_(std::exchange(other.ownsName_, false)) {}

SharedSegment::~SharedSegment() {
  removeName();
  if (data_ != nullptr) ::munmap(data_, bytes_);
  if (file_ >= 0) ::close(file_);
}

void SharedSegment::removeName() {
  if (std::exchange(ownsName_, false)) ::shm_unlink(name_.c_str());
}

void SharedSegment::take(int seat) {
  struct flock lock = lockOf(seat, F_WRLCK);
  TORCH_CHECK(::fcntl(file_, F_SETLK, &lock) == 0, "bagua: cannot lock seat ", seat,
              " of the shared memory: ", std::strerror(errno));
}

bool SharedSegment::isTaken(int seat) const {
  struct flock lock = lockOf(seat, F_WRLCK);
  return ::fcntl(file_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace bagua

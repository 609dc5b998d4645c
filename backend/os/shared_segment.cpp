// SPDX-License-Identifier: Apache-2.0
#include "backend/os/shared_segment.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

namespace bagua {
namespace {

constexpr const char* kFolder = "/dev/shm";
constexpr std::string_view kPrefix = "/bagua-";
constexpr std::string_view kNameCharacters = "0123456789abcdef-";
// The creator of a segment holds a lock on this byte as long as it lives; those before it are the seats.
constexpr int kCreatorSeat = 1 << 30;
// A name without a lock that is younger may be one that is being made.
constexpr time_t kYoungSeconds = 10;

std::string withErrno(const char* call, int error) { return std::string(call) + ": " + std::strerror(error); }

// The process, for whoever looks into /dev/shm, and 128 random bits. Empty if the system has none.
std::string newName(std::string& whyNot) {
  std::array<uint8_t, 16> random{};
  if (::getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) {
    whyNot = withErrno("getrandom", errno);
    return "";
  }
  std::string name = std::string(kPrefix) + std::to_string(::getpid()) + "-";
  for (const uint8_t byte : random) {
    name += kNameCharacters[byte / 16];
    name += kNameCharacters[byte % 16];
  }
  return name;
}

bool isName(const std::string& name) {
  return name.starts_with(kPrefix) && name.find_first_not_of(kNameCharacters, kPrefix.size()) == std::string::npos;
}

// What speaks against mapping a file that a peer has named. One that is shorter would end the process by a signal.
std::string objectionTo(int file, size_t bytes) {
  struct stat status {};
  if (::fstat(file, &status) != 0) return withErrno("fstat", errno);
  if (!S_ISREG(status.st_mode)) return "it is no regular file";
  if (status.st_uid != ::geteuid()) return "it belongs to user " + std::to_string(status.st_uid);
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) return "it is open to other users";
  if (status.st_size != static_cast<off_t>(bytes)) {
    return "it has " + std::to_string(status.st_size) + " bytes instead of " + std::to_string(bytes);
  }
  return "";
}

struct flock lockOf(int seat, short type) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = seat;
  lock.l_len = 1;
  return lock;
}

// Locks belong to the open file: other places of this process see them, too, and to close the same file there does not
// drop them.
bool takeLock(int file, int seat) {
  struct flock lock = lockOf(seat, F_WRLCK);
  return ::fcntl(file, F_OFD_SETLK, &lock) == 0;
}

// Makes a new file ready; empty, or what the system says against it.
std::string reserve(int file, size_t bytes) {
  if (!takeLock(file, kCreatorSeat)) return withErrno("fcntl", errno);
  // Reserved now: memory that is found missing later would end the process by a signal.
  int error = EINTR;
  while (error == EINTR) error = ::posix_fallocate(file, 0, static_cast<off_t>(bytes));
  return error == 0 ? "" : withErrno("posix_fallocate", error);
}

// Whether somebody else has locked it.
bool isLocked(int file, int seat) {
  struct flock lock = lockOf(seat, F_WRLCK);
  return ::fcntl(file, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

bool isOldAndOwn(const std::filesystem::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0 || status.st_uid != ::geteuid()) return false;
  return ::time(nullptr) - status.st_ctime >= kYoungSeconds;
}

}  // namespace

void SharedSegment::removeAbandonedNames() {
  std::error_code error;
  std::filesystem::directory_iterator entry(kFolder, error);
  // Its ++ would throw.
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    std::string name = "/";
    name += entry->path().filename().string();
    if (!isName(name) || !isOldAndOwn(entry->path())) continue;
    const int file = ::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
    if (file < 0) continue;
    if (!isLocked(file, kCreatorSeat)) ::shm_unlink(name.c_str());
    ::close(file);
  }
}

std::optional<SharedSegment> SharedSegment::create(size_t bytes, std::string& whyNot) {
  removeAbandonedNames();
  const std::string name = newName(whyNot);
  if (name.empty()) return std::nullopt;
  UnsharedFile file(::shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!file.isOpen()) {
    whyNot = withErrno("shm_open", errno);
    return std::nullopt;
  }
  whyNot = reserve(file.number(), bytes);
  auto segment = whyNot.empty() ? map(name, std::move(file), bytes, whyNot) : std::nullopt;
  if (segment) {
    segment->ownsName_ = true;
  } else {
    ::shm_unlink(name.c_str());
  }
  return segment;
}

std::optional<SharedSegment> SharedSegment::open(const std::string& name, size_t bytes, std::string& whyNot) {
  if (!isName(name)) {
    whyNot = "the name that was told is none of ours";
    return std::nullopt;
  }
  UnsharedFile file(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
  if (!file.isOpen()) {
    whyNot = withErrno("shm_open", errno);
    return std::nullopt;
  }
  whyNot = objectionTo(file.number(), bytes);
  if (!whyNot.empty()) return std::nullopt;
  return map(name, std::move(file), bytes, whyNot);
}

std::optional<SharedSegment> SharedSegment::map(const std::string& name, UnsharedFile file, size_t bytes,
                                                std::string& whyNot) {
  void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.number(), 0);
  if (data == MAP_FAILED) {
    whyNot = withErrno("mmap", errno);
    return std::nullopt;
  }
  // A child's mapping would keep the open file, and with it the locks.
  if (::madvise(data, bytes, MADV_DONTFORK) != 0) {
    whyNot = withErrno("madvise", errno);
    ::munmap(data, bytes);
    return std::nullopt;
  }
  return SharedSegment(name, std::move(file), static_cast<uint8_t*>(data), bytes);
}

SharedSegment::SharedSegment(SharedSegment&& other) noexcept
    : name_(std::move(other.name_)),
      file_(std::move(other.file_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      ownsName_(std::exchange(other.ownsName_, false)) {}

SharedSegment::~SharedSegment() {
  // Moved from, or the copy of a forked child, where something else may be mapped in its place.
  if (!isOpen()) return;
  removeName();
  ::munmap(data_, bytes_);
}

void SharedSegment::removeName() {
  if (!isOpen()) return;
  const bool isAbandoned = !isLocked(file_.number(), kCreatorSeat);
  if (std::exchange(ownsName_, false) || isAbandoned) ::shm_unlink(name_.c_str());
}

void SharedSegment::removeOnlyHeardName() {
  ownsName_ = true;
  removeName();
}

void SharedSegment::take(int seat) {
  TORCH_CHECK(takeLock(file_.number(), seat), "bagua: cannot lock seat ", seat,
              " of the shared memory: ", std::strerror(errno));
}

bool SharedSegment::isTaken(int seat) const { return isLocked(file_.number(), seat); }

}  // namespace bagua

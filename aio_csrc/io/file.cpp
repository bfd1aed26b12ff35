#include "io/file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <memory>

#include "io/error.h"

namespace offload {

namespace {

constexpr uint64_t kAlignmentMax = 64 * 1024;
// Buffered writes whose pages may still be dirty: enough for write-back to run behind, small beside a slab.
constexpr size_t kWrittenBackMax = 32;

int open_retrying(const char* path, int flags, mode_t mode) noexcept {
  int fd = -1;
  do {
    fd = ::open(path, flags | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

UniqueFd open_buffered(const FileOptions& options) {
  const int create = options.create ? O_CREAT : 0;
  int fd = open_retrying(options.path.c_str(), O_RDWR | create, options.mode);
  const bool may_be_readable = !options.create && (errno == EACCES || errno == EROFS || errno == EPERM);
  if (fd < 0 && may_be_readable) fd = open_retrying(options.path.c_str(), O_RDONLY, 0);
  if (fd < 0) throw IoError(errno, "open");
  return UniqueFd(fd);
}

bool usable(uint64_t alignment) noexcept {
  return std::has_single_bit(alignment) && alignment <= kAlignmentMax;
}

}  // namespace

IoFile::IoFile(const FileOptions& options)
    : policy_(options.direct_io),
      buffered_(open_buffered(options)),
      alignment_(static_cast<uint64_t>(::sysconf(_SC_PAGESIZE))),
      memory_alignment_(alignment_) {
  probe_alignment();
  if (policy_ == DirectIo::kOff) return;                      // asked for the page cache and its readahead
  ::posix_fadvise(buffered_.get(), 0, 0, POSIX_FADV_RANDOM);  // Note [No readahead]
  open_direct(options);
}

void IoFile::open_direct(const FileOptions& options) {
  const int access = ::fcntl(buffered_.get(), F_GETFL) & O_ACCMODE;
  int error = 0;
  direct_ = UniqueFd(open_retrying(options.path.c_str(), access | O_DIRECT, 0));
  if (!direct_) error = errno;
  if (error == 0) error = probe_transfer();
  if (error != 0) {
    direct_error_ = error;
    if (policy_ == DirectIo::kRequired) throw IoError(error, "open with O_DIRECT");
    return;
  }
  is_direct_ = true;
}

// The page size, or more where the file system says so (statx, Linux 6.1) or, before that, where the block
// size of the device or of the file is larger.
void IoFile::probe_alignment() noexcept {
#ifdef STATX_DIOALIGN
  struct statx about;
  const int rc = ::statx(buffered_.get(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &about);
  if (rc == 0 && (about.stx_mask & STATX_DIOALIGN) != 0 && about.stx_dio_offset_align != 0) {
    if (usable(about.stx_dio_offset_align)) {
      alignment_ = std::max<uint64_t>(alignment_, about.stx_dio_offset_align);
    }
    if (usable(about.stx_dio_mem_align)) memory_alignment_ = about.stx_dio_mem_align;
    return;
  }
#endif
  struct stat status;
  if (::fstat(buffered_.get(), &status) != 0) return;
  uint64_t block = static_cast<uint64_t>(status.st_blksize);
  if (S_ISBLK(status.st_mode)) {
    int logical = 0;
    if (::ioctl(buffered_.get(), BLKSSZGET, &logical) == 0) block = static_cast<uint64_t>(logical);
  }
  if (usable(block)) alignment_ = memory_alignment_ = std::max(alignment_, block);
}

// Reads one block. 0, or the errno of a file system that opens with O_DIRECT and then refuses transfers. An
// empty file may let this pass, so the queue looks at EINVAL later, too.
int IoFile::probe_transfer() const noexcept {
  const std::unique_ptr<void, decltype(&std::free)> block(std::aligned_alloc(alignment_, alignment_),
                                                          &std::free);
  if (block == nullptr) return ENOMEM;
  ssize_t rc = -1;
  do {
    rc = ::pread(direct_.get(), block.get(), alignment_, 0);
  } while (rc < 0 && errno == EINTR);
  return rc < 0 && (errno == EINVAL || errno == EOPNOTSUPP) ? errno : 0;
}

bool IoFile::give_up_direct(int error) noexcept {
  if (policy_ == DirectIo::kRequired) return false;
  if (is_direct_.exchange(false)) direct_error_ = error;
  return true;
}

bool IoFile::preallocate(uint64_t size) {
  const uint64_t before = this->size();
  int rc = -1;
  do {
    rc = ::fallocate(buffered_.get(), 0, 0, static_cast<off_t>(size));
  } while (rc != 0 && errno == EINTR);
  if (rc == 0) return true;
  int error = errno;
  if (error == EOPNOTSUPP || error == ENOSYS) {
    if (size <= before || ::ftruncate(buffered_.get(), static_cast<off_t>(size)) == 0) return false;
    error = errno;
  }
  // What was reserved before the space ran out stays, unless it is given back.
  if (size > before) [[maybe_unused]]
    const int given_back = ::ftruncate(buffered_.get(), static_cast<off_t>(before));
  throw IoError(error, "fallocate");
}

uint64_t IoFile::size() const {
  const off_t end = ::lseek(buffered_.get(), 0, SEEK_END);  // unlike fstat, right for block devices as well
  if (end < 0) throw IoError(errno, "lseek");
  return static_cast<uint64_t>(end);
}

void IoFile::close() noexcept {
  direct_.reset();
  buffered_.reset();
}

// POSIX_FADV_DONTNEED drops clean pages and only begins to write dirty ones back. So a written range is told
// twice: now, and once more when enough others have followed it. Pages that a range covers in part are never
// dropped, so heads and tails (Note [Unaligned transfers]) stay until the next sync: two pages for a
// transfer.
void IoFile::forget_cached(uint64_t offset, uint64_t size, bool written) noexcept {
  if (policy_ == DirectIo::kOff || size < alignment_) return;  // kOff asked for the page cache
  const auto forget = [&](uint64_t begin, uint64_t count) {
    ::posix_fadvise(buffered_.get(), static_cast<off_t>(begin), static_cast<off_t>(count),
                    POSIX_FADV_DONTNEED);
  };
  forget(offset, size);
  if (!written) return;
  written_back_.emplace_back(offset, size);
  if (written_back_.size() <= kWrittenBackMax) return;
  forget(written_back_.front().first, written_back_.front().second);
  written_back_.pop_front();
}

void IoFile::forget_all_cached() noexcept {
  if (policy_ == DirectIo::kOff) return;
  ::posix_fadvise(buffered_.get(), 0, 0, POSIX_FADV_DONTNEED);
  written_back_.clear();
}

}  // namespace offload

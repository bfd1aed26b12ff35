#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>

#include "util/unique_fd.h"

namespace offload {

enum class DirectIo : uint8_t { kAuto, kRequired, kOff };

struct FileOptions {
  std::string path;
  DirectIo direct_io = DirectIo::kAuto;
  bool create = true;
  mode_t mode = 0600;
};

// Note [Unaligned transfers]
// O_DIRECT wants file offset, size and memory address aligned; callers may pass anything. Of a transfer, the
// part that covers whole pages of the file goes direct; the head and the tail that cover parts of a page, and
// pieces whose memory address is odd, go through a second, buffered descriptor of the same file. The other
// way, a bounce buffer, would need memory that no budget knows, a copy on the queue's thread and, for writes,
// a read-modify-write that loses a neighbour's bytes when two tickets meet in one block. The page cache does
// that under its page lock.
//
// It is coherent because within one page a transfer is either all direct or all buffered: direct I/O writes
// back and drops the cached pages of its range first, so the only page that could hold stale bytes is one
// that both kinds touch at once, and then the two transfers overlap in the file and have no order anyhow.
// Hence the alignment is never below the page size, even where the device takes 512, and hence the buffered
// descriptor reads nothing ahead: neighbouring pages do not enter the cache.
//
// Note [No readahead]
// Nor does it where direct I/O is refused and everything goes through it. Readahead is twice as fast there on
// a file read forwards, no faster backwards, and it fills the cache: it brings folios of up to 2 MiB that
// reach over the end of a piece, and the kernel drops no folio that it is told of in part. Of a file read in
// pieces of 1 MiB, three quarters stayed in memory that no budget knows.

// One file, open for direct and for buffered I/O.
class IoFile {
 public:
  explicit IoFile(const FileOptions& options);  // throws IoError

  // The descriptor for a piece. They stay open until the end, also where direct I/O has been given up.
  [[nodiscard]] int fd(bool direct) const noexcept { return direct ? direct_.get() : buffered_.get(); }

  // Whether aligned transfers bypass the page cache. May turn false later; see give_up_direct.
  [[nodiscard]] bool direct() const noexcept { return is_direct_.load(std::memory_order_relaxed); }
  // The errno with which direct I/O was refused; 0 where it was not, or not wanted.
  [[nodiscard]] int direct_error() const noexcept { return direct_error_.load(std::memory_order_relaxed); }

  // File offset and size of a direct transfer are multiples of `alignment`, its address of
  // `memory_alignment`.
  [[nodiscard]] uint64_t alignment() const noexcept { return alignment_; }
  [[nodiscard]] uint64_t memory_alignment() const noexcept { return memory_alignment_; }

  // Some file systems open with O_DIRECT and refuse the transfer. Goes buffered for good where the options
  // allow that; false where they do not.
  [[nodiscard]] bool give_up_direct(int error) noexcept;

  // Makes the file at least `size` long, with its space reserved. False where the file system cannot
  // reserve: the file is then long, but sparse. Throws IoError; the file is then as before.
  bool preallocate(uint64_t size);

  [[nodiscard]] uint64_t size() const;  // throws IoError

  // Closes the descriptors; nothing else may be called after it.
  void close() noexcept;

  // Page cache is memory that no budget knows. Called by one thread, after each buffered transfer and sync.
  void forget_cached(uint64_t offset, uint64_t size, bool written) noexcept;
  void forget_all_cached() noexcept;

 private:
  void open_direct(const FileOptions& options);
  void probe_alignment() noexcept;
  [[nodiscard]] int probe_transfer() const noexcept;

  const DirectIo policy_;
  UniqueFd buffered_;
  UniqueFd direct_;
  uint64_t alignment_;
  uint64_t memory_alignment_;
  std::atomic<bool> is_direct_ = false;
  std::atomic<int> direct_error_ = 0;
  std::deque<std::pair<uint64_t, uint64_t>> written_back_;  // ranges whose write-back has begun
};

}  // namespace offload

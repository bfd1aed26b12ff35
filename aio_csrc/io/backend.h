#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>

namespace offload {

enum class IoOp : uint8_t { kRead, kWrite, kSync };
inline constexpr size_t kIoOpCount = 3;

struct IoRequest {
  IoOp op;
  int fd;
  std::byte* buffer;  // kSync: unused
  uint64_t size;      // kSync: 0
  uint64_t offset;
  uint64_t token;  // returned with the completion; any value below UINT64_MAX
};

struct IoCompletion {
  uint64_t token;
  int64_t result;  // bytes transferred, or -errno
};

struct IoCapabilities {
  const char* name;
  size_t depth_max;        // requests it keeps in flight at once
  bool sqpoll = false;     // the kernel picks requests up by itself
  int sqpoll_refused = 0;  // the errno with which it does not, although asked to
};

// The kernel interface, as narrow as the simplest honest implementation. What every backend would repeat
// (splitting, depth, short transfers, retries, errors) lives above it, in IoQueue.
//
// One thread calls submit and reap; wake may be called from any thread.
class IoBackend {
 public:
  virtual ~IoBackend() = default;

  // Takes as many requests from the front as fit, without blocking; returns how many. They are started at
  // the latest by the next reap. Takes at least one when nothing is in flight.
  [[nodiscard]] virtual size_t submit(std::span<const IoRequest> requests) = 0;

  // Waits until at least count_min are done or wake() is called, then fills `out` from the front and returns
  // how many. Short results are reported, not retried. With nothing in flight it sleeps until wake().
  [[nodiscard]] virtual size_t reap(std::span<IoCompletion> out, size_t count_min) = 0;

  // Ends the reap that sleeps now, or else the next one.
  virtual void wake() noexcept = 0;

  [[nodiscard]] virtual IoCapabilities capabilities() const noexcept = 0;

  // Descriptors that requests will name until the end (default: nothing to prepare). By the thread that
  // submits.
  virtual void use_files(std::span<const int> /*fds*/) {}

  // Prepares memory for transfers to and from any part of it: 0, or the errno of the refusal, and then
  // transfers work as before (default: ENOTSUP, nothing to gain). It must not be unmapped before it is
  // removed or the backend is gone. By the thread that submits.
  [[nodiscard]] virtual int add_region(std::span<std::byte> /*region*/) { return ENOTSUP; }
  virtual void remove_region(std::span<std::byte> /*region*/) {}

  // CPU time of threads of its own (default: it has none). From any thread.
  [[nodiscard]] virtual double cpu_seconds() const noexcept { return 0; }
};

}  // namespace offload

#include "io/libaio_backend.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "io/error.h"

namespace offload {

namespace {

constexpr uint64_t kWakeToken = UINT64_MAX;
constexpr size_t kDepthMax = 4096;
// The longest transfer one request may name (the kernel's MAX_RW_COUNT, rounded down); the rest is a short
// result.
constexpr uint64_t kTransferMax = uint64_t{1} << 30;

UniqueFd make_eventfd() {
  UniqueFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) throw BackendError(errno, "eventfd");
  return fd;
}

void fill(iocb& block, const IoRequest& request) noexcept {
  std::memset(&block, 0, sizeof(block));
  block.aio_data = request.token;
  block.aio_fildes = static_cast<uint32_t>(request.fd);
  if (request.op == IoOp::kSync) {
    block.aio_lio_opcode = IOCB_CMD_FDSYNC;
    return;
  }
  block.aio_lio_opcode = request.op == IoOp::kRead ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
  block.aio_buf = reinterpret_cast<uint64_t>(request.buffer);
  block.aio_nbytes = std::min(request.size, kTransferMax);
  block.aio_offset = static_cast<int64_t>(request.offset);
}

}  // namespace

LibaioBackend::LibaioBackend(size_t depth)
    : depth_max_(std::clamp<size_t>(depth, 1, kDepthMax)), wake_fd_(make_eventfd()) {
  blocks_.resize(depth_max_);
  block_pointers_.resize(depth_max_);
  events_.resize(depth_max_ + 1);  // one more for the poll of wake()
  if (::syscall(__NR_io_setup, depth_max_ + 1, &context_) != 0) throw BackendError(errno, "io_setup");
  try {
    arm_wake();  // Linux before 4.18 has no poll here, and says so at once
    timespec at_once{};
    const long rc = ::syscall(__NR_io_getevents, context_, 0L, 1L, events_.data(), &at_once);
    if (rc < 0) throw BackendError(errno, "io_getevents");
  } catch (...) {
    ::syscall(__NR_io_destroy, context_);
    throw;
  }
}

// Returns when every request has ended; the poll is cancelled.
LibaioBackend::~LibaioBackend() { ::syscall(__NR_io_destroy, context_); }

size_t LibaioBackend::submit(std::span<const IoRequest> requests) {
  const size_t count = std::min(requests.size(), depth_max_ - in_flight_);
  for (size_t i = 0; i < count; ++i) {
    fill(blocks_[i], requests[i]);
    block_pointers_[i] = &blocks_[i];
  }
  size_t taken = 0;
  while (taken < count) {
    const long rc = ::syscall(__NR_io_submit, context_, count - taken, block_pointers_.data() + taken);
    if (rc > 0) {
      taken += static_cast<size_t>(rc);
      continue;
    }
    // The first of the rest was refused. EAGAIN: the kernel is short of memory; where others are in flight,
    // theirs comes back. Everything else is the outcome of this one request.
    const int error = rc < 0 ? errno : EAGAIN;
    if (error == EINTR) continue;
    if (error == EAGAIN && in_flight_ + taken > 0) break;
    refused_.push_back({requests[taken].token, -static_cast<int64_t>(error)});
    ++taken;
  }
  in_flight_ += taken;
  return taken;
}

size_t LibaioBackend::reap(std::span<IoCompletion> out, size_t count_min) {
  size_t count = take_refused(out);
  bool woken = false;
  do {
    arm_wake();
    const size_t missing = count_min > count ? count_min - count : 0;
    count += take(out.subspan(count), missing, woken);
  } while (count < count_min && !woken);
  in_flight_ -= count;
  return count;
}

size_t LibaioBackend::take_refused(std::span<IoCompletion> out) {
  const size_t count = std::min(out.size(), refused_.size());
  const auto end = refused_.begin() + static_cast<ptrdiff_t>(count);
  std::copy(refused_.begin(), end, out.begin());
  refused_.erase(refused_.begin(), end);
  return count;
}

size_t LibaioBackend::take(std::span<IoCompletion> out, size_t count_min, bool& woken) {
  if (out.empty()) return 0;
  // One at least, then what is there: waiting for more would let the poll of wake() stand in for a transfer.
  const size_t wanted = std::min<size_t>(count_min, 1);
  timespec at_once{};
  const long rc = ::syscall(__NR_io_getevents, context_, wanted, out.size(), events_.data(),
                            wanted == 0 ? &at_once : nullptr);
  if (rc < 0) {
    if (errno == EINTR) return 0;
    throw IoError(errno, "io_getevents");
  }
  size_t count = 0;
  for (long i = 0; i < rc; ++i) {
    const io_event& event = events_[static_cast<size_t>(i)];
    if (event.data != kWakeToken) {
      out[count++] = {event.data, event.res};
      continue;
    }
    uint64_t wakes = 0;  // EAGAIN where none is pending is as good
    [[maybe_unused]] const ssize_t bytes = ::read(wake_fd_.get(), &wakes, sizeof(wakes));
    wake_armed_ = false;
    woken = true;
  }
  return count;
}

void LibaioBackend::arm_wake() {
  if (wake_armed_) return;
  iocb block;
  std::memset(&block, 0, sizeof(block));
  block.aio_data = kWakeToken;
  block.aio_fildes = static_cast<uint32_t>(wake_fd_.get());
  block.aio_lio_opcode = IOCB_CMD_POLL;
  block.aio_buf = POLLIN;
  iocb* pointer = &block;
  while (::syscall(__NR_io_submit, context_, 1L, &pointer) != 1) {
    if (errno == EINTR || errno == EAGAIN) continue;
    throw BackendError(errno == EINVAL ? EOPNOTSUPP : errno, "io_submit");
  }
  wake_armed_ = true;
}

void LibaioBackend::wake() noexcept {
  const uint64_t one = 1;
  // Fails only where the counter is about to overflow, and then the descriptor is readable as it should be.
  [[maybe_unused]] const ssize_t rc = ::write(wake_fd_.get(), &one, sizeof(one));
}

}  // namespace offload

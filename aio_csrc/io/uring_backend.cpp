#include "io/uring_backend.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <thread>

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

}  // namespace

UringBackend::UringBackend(size_t depth, bool sqpoll)
    : depth_max_(std::clamp<size_t>(depth, 1, kDepthMax)),
      wake_fd_(make_eventfd()),
      ring_(static_cast<uint32_t>(std::bit_ceil(depth_max_ + 1)), sqpoll) {
}  // one more for the poll of wake()

// The kernel takes a ring apart some time after it is closed, and in a forked child it may stay: what it
// holds of files and memory is given back here.
UringBackend::~UringBackend() {
  if (!files_.empty()) [[maybe_unused]]
    const int error = ring_.register_with(IORING_UNREGISTER_FILES, nullptr, 0);
  memory_.clear(ring_);
}

void UringBackend::use_files(std::span<const int> fds) {
  const int error = ring_.register_with(IORING_REGISTER_FILES, fds.data(), static_cast<uint32_t>(fds.size()));
  if (error == 0) files_.assign(fds.begin(), fds.end());  // else requests name descriptors, as well as before
}

void UringBackend::fill(io_uring_sqe& sqe, const IoRequest& request) const noexcept {
  const auto file = std::find(files_.begin(), files_.end(), request.fd);
  const bool registered = file != files_.end();
  sqe.fd = registered ? static_cast<int>(file - files_.begin()) : request.fd;
  sqe.flags = registered ? IOSQE_FIXED_FILE : 0;
  sqe.user_data = request.token;
  if (request.op == IoOp::kSync) {
    sqe.opcode = IORING_OP_FSYNC;
    sqe.fsync_flags = IORING_FSYNC_DATASYNC;
    return;
  }
  const bool is_read = request.op == IoOp::kRead;
  sqe.addr = reinterpret_cast<uint64_t>(request.buffer);
  sqe.len = static_cast<uint32_t>(std::min(request.size, kTransferMax));
  sqe.off = request.offset;
  const int region = memory_.index_of(request.buffer, sqe.len);
  if (region < 0) {
    sqe.opcode = is_read ? IORING_OP_READ : IORING_OP_WRITE;
  } else {
    sqe.opcode = is_read ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
    sqe.buf_index = static_cast<uint16_t>(region);
  }
}

size_t UringBackend::submit(std::span<const IoRequest> requests) {
  const size_t count = std::min(requests.size(), depth_max_ - in_flight_);
  for (size_t i = 0; i < count; ++i) {
    io_uring_sqe* sqe = ring_.next_sqe();
    if (sqe == nullptr) {  // the kernel has left earlier entries in the ring
      in_flight_ += i;
      return i;
    }
    fill(*sqe, requests[i]);
  }
  in_flight_ += count;
  return count;  // the enter that reap needs anyway hands them over: one system call for both
}

size_t UringBackend::reap(std::span<IoCompletion> out, size_t count_min) {
  arm_wake();
  size_t count = 0;
  bool woken = false;
  bool entered = count_min > 0;  // reap(0) looks at least once
  for (;;) {
    count += take(out.subspan(count), woken);
    const bool enough = count >= count_min || woken;
    if (enough && ring_.unsubmitted() == 0 && (entered || count > 0)) break;
    entered = true;
    int error = ring_.enter(enough ? 0 : static_cast<uint32_t>(count_min - count));
    if (error == EAGAIN || error == EBUSY) {
      // The kernel lacks memory for the request, or room for its completion. Both come back as transfers
      // end; what it has not taken stays in the ring and is offered again.
      if (enough || count > 0) break;
      error = 0;
      if (in_flight_ > ring_.unsubmitted()) {
        error = ring_.wait(1);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    if (error != 0 && error != EINTR) throw IoError(error, "io_uring_enter");
  }
  in_flight_ -= count;
  return count;
}

size_t UringBackend::take(std::span<IoCompletion> out, bool& woken) noexcept {
  size_t count = 0;
  io_uring_cqe cqe;
  while (count < out.size() && ring_.pop(cqe)) {
    if (cqe.user_data != kWakeToken) {
      out[count++] = {cqe.user_data, cqe.res};
      continue;
    }
    uint64_t wakes = 0;  // EAGAIN where none is pending is as good
    [[maybe_unused]] const ssize_t rc = ::read(wake_fd_.get(), &wakes, sizeof(wakes));
    wake_armed_ = false;
    woken = true;
  }
  return count;
}

void UringBackend::arm_wake() noexcept {
  if (wake_armed_) return;
  io_uring_sqe* sqe = ring_.next_sqe();
  if (sqe == nullptr) return;  // full of our requests: their completions end the wait
  sqe->opcode = IORING_OP_POLL_ADD;
  sqe->fd = wake_fd_.get();
  sqe->poll_events = POLLIN;
  sqe->user_data = kWakeToken;
  wake_armed_ = true;
}

void UringBackend::wake() noexcept {
  const uint64_t one = 1;
  // Fails only where the counter is about to overflow, and then the descriptor is readable as it should be.
  [[maybe_unused]] const ssize_t rc = ::write(wake_fd_.get(), &one, sizeof(one));
}

}  // namespace offload
